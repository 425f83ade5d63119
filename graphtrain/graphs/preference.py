"""Pairs of answers of DPO, in a batch and in the parts of a pipeline."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from graphtrain.config.schema import Loss
from graphtrain.models.loss import dpo_loss, log_probabilities
from lowering.tracing.constrain import manual_axes_of
from lowering.trees import Tree
from sharding_rules.errors import ShardingError


def pair_mask(weights: jax.Array) -> jax.Array:
    """Return 1.0 for each pair of rows in which both are answers, else 0.0: (..., batch / 2).

    A row of loss weights (..., batch, seq) is an answer unless all its weights are 0.
    """
    return _both_are_answers((weights != 0).any(-1))


def pair_count(weights: jax.Array) -> jax.Array:
    """Return the number of pairs of answers, by their loss weights (..., batch, seq)."""
    return pair_mask(weights).sum()


def answer_score(logits: jax.Array, microbatch: Tree) -> tuple[jax.Array, Tree]:
    """Return log p of each row's answer (batch,): the score of the last part of a pipeline.

    Args:
        logits: float32 (batch, seq, vocab), of all positions or those of this device.
        microbatch: Targets and loss weights of these positions.
    """
    return log_probabilities(logits, microbatch["targets"], microbatch["weights"]), {}


def pipelined_dpo(
    log_ratio: jax.Array, weights: jax.Array, loss: Loss, *, shared_by_stages: bool
) -> dict[str, jax.Array]:
    """Return the results of dpo_loss for one microbatch, as this device's terms of their sums.

    Devices that compute the logits of other positions first add their log probabilities.

    Args:
        log_ratio: (batch,) of the answers' tokens at this device's positions; see dpo_loss.
        weights: Loss weights of these positions (batch, seq).
        loss: Settings.
        shared_by_stages: Whether each stage has some of the positions, as in steps with 1f1b.

    Raises:
        ShardingError: the two answers of a pair are on different devices.
    """
    if len(log_ratio) % 2:
        raise ShardingError(
            f'loss.kind = "dpo": mesh.data splits a microbatch into {len(log_ratio)} rows per '
            "device, which are no pairs; raise batch.global_batch_size, or lower "
            "batch.microbatches or mesh.data"
        )
    axes = manual_axes_of("seq") + (manual_axes_of("stages") if shared_by_stages else ())
    answers, devices = (weights != 0).sum(-1), 1
    if axes:
        log_ratio, answers = jax.lax.psum((log_ratio, answers), axes)
        devices = jax.lax.axis_size(axes)
    sums = dpo_loss(log_ratio, _both_are_answers(answers > 0), loss)
    return {name: total / devices for name, total in sums.items()}


def _both_are_answers(answers: jax.Array) -> jax.Array:
    return answers.reshape(*answers.shape[:-1], -1, 2).all(-1).astype(jnp.float32)
