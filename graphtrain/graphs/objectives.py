"""What training minimises: cross-entropy, or DPO's loss of pairs of answers, of one microbatch."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from graphtrain.config.resolve import mesh_shape
from graphtrain.config.schema import Program
from graphtrain.graphs.deferred_reduction import Objective, key_here, own_here
from graphtrain.graphs.dispatch import before_head, drops, forward
from graphtrain.models.attention.segment_mask import apart
from graphtrain.models.block import Auxiliary
from graphtrain.models.chunk_size import chunk_of
from graphtrain.models.chunked_loss import Scored, chunked_cross_entropy
from graphtrain.models.lora.layers import combine, reference
from graphtrain.models.loss import cross_entropy, log_probabilities, preference
from lowering.machine.target import Target
from lowering.tracing.threefry import UNROLLED
from lowering.trees import Tree
from sharding_rules.rules import Rules


def metric_names(program: Program) -> tuple[str, ...]:
    """What the loss reports of a batch."""
    return ("loss", "margin", "accuracy") if program.loss.kind == "preference" else ("loss",)


def cross_entropy_objective(
    program: Program, state: Tree, frozen: Tree | None, batch: Tree
) -> Objective:
    """What training minimises, of one microbatch; the sum over microbatches is that of a step."""
    targets = jnp.maximum(batch["weights"].sum(), 1.0)
    run = _model(program, state, frozen, partial(token_losses, total=targets))

    def objective(parameters: Tree, microbatch: Tree, index: Any) -> tuple[jax.Array, Tree]:
        (value, loss), added = run(parameters, microbatch, index)
        return value + added, {"loss": loss}

    return objective


def token_losses(
    program: Program,
    weights: Tree,
    batch: Tree,
    dropout_key: jax.Array | None = None,
    *,
    total: jax.Array | float = 1.0,
) -> tuple[tuple[jax.Array, jax.Array], Auxiliary]:
    """Sums over a batch, divided by total, of what is minimised and of -log p(target).

    Beside them what the layers add to the loss.
    """
    model, tokens, (targets, counts) = program.model, batch["tokens"], _asked(batch)
    z_loss = program.loss.z_loss
    chunk = chunk_of(program, Rules.load(program.rules), mesh_shape(program))
    if chunk is None:
        out, auxiliary = forward(model, weights, tokens, dropout_key=dropout_key)
        loss, squares = cross_entropy(out, targets, counts)
        return ((loss + z_loss * squares) / total, loss / total), auxiliary
    hidden, head, auxiliary = before_head(model, weights, tokens, dropout_key=dropout_key)
    scored = Scored(chunk, model.tied_head, model.logit_cap, z_loss)
    # Divided before: gradients are made on the way, and would be read and written once more.
    return chunked_cross_entropy(hidden, head, targets, counts / total, scored), auxiliary


def scores(
    program: Program, weights: Tree, batch: Tree, dropout_key: jax.Array | None = None
) -> tuple[jax.Array, Auxiliary]:
    """log p of every row's answer, and what the layers add to the loss."""
    out, auxiliary = forward(program.model, weights, batch["tokens"], dropout_key=dropout_key)
    return log_probabilities(out, *_asked(batch)), auxiliary


def _asked(batch: Tree) -> tuple[jax.Array, jax.Array]:
    return batch["targets"], batch["weights"]


def preference_objective(
    program: Program, state: Tree, frozen: Tree | None, batch: Tree
) -> Objective:
    """DPO's, of one microbatch, whose rows 2i and 2i + 1 are the better and the worse answer."""
    run = _model(program, state, frozen, scores)
    pairs = jnp.maximum(count_pairs(batch["weights"]), 1.0)

    def objective(parameters: Tree, microbatch: Tree, index: Any) -> tuple[jax.Array, Tree]:
        before = reference_scores(program, frozen, microbatch)
        after, added = run(parameters, microbatch, index)
        metrics = preference(after - before, is_pair(microbatch["weights"]), program.loss)
        metrics = {name: total / pairs for name, total in metrics.items()}
        return metrics["loss"] + added, metrics

    return objective


def _model(
    program: Program, state: Tree, frozen: Tree | None, compute: Callable[..., Any]
) -> Callable[..., Any]:
    """What is computed of a microbatch with what is trained, and what layers add to the loss."""
    key, adapter = step_key(program, state), program.adapter
    in_adapter = adapter is not None and bool(adapter.dropout)
    in_model = drops(program.model)

    def run(parameters: Tree, microbatch: Tree, index: Any) -> tuple[jax.Array, Any]:
        dropout = key_here(jax.random.fold_in(key, index)) if in_adapter or in_model else None
        weights = combine(program, parameters, own_here(frozen), dropout)
        of_model = dropout if in_model else None
        with apart(microbatch.get("documents")):
            found, auxiliary = compute(program, weights, microbatch, of_model)
        return found, sum(auxiliary.values()) / program.batch.microbatches

    return run


def reference_scores(program: Program, frozen: Tree | None, batch: Tree) -> jax.Array:
    """log p of every row's answer before training: of the frozen weights, without adapters."""
    with apart(batch.get("documents")):
        found, _ = scores(program, reference(program, frozen), batch)
    return jax.lax.stop_gradient(found)


def is_pair(weights: jax.Array) -> jax.Array:
    """Of every pair of rows (..., batch, seq) whether both hold answers, 1.0 or 0.0."""
    answers = (weights != 0).any(-1)
    return answers.reshape(*answers.shape[:-1], -1, 2).all(-1).astype(jnp.float32)


def count_pairs(weights: jax.Array) -> jax.Array:
    return is_pair(weights).sum()


def step_key(program: Program, state: Tree) -> jax.Array:
    key = jax.random.wrap_key_data(state["key"], impl=random_bits(program))
    return jax.random.fold_in(key, state["step"])


def random_bits(program: Program) -> Hashable | None:
    """How random bits are made: as JAX is set, unless the target cannot, or can sooner."""
    target = Target.parse(program.target)
    return UNROLLED if target.platform == "cpu" else target.random_bits
