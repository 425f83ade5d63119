"""Gradients and loss of a batch whose microbatches pass through a pipeline."""

from typing import Any

import jax
import jax.numpy as jnp

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import is_imported
from graphtrain.graphs.dispatch import has_dropout, merge_gradients, pipeline, split_for_pipeline
from graphtrain.models.loss import cross_entropy
from graphtrain.models.pipeline_stages import split_batch
from lowering.pipeline.schedules import PipelineLoss
from lowering.tracing.constrain import mesh_axes_of, placement
from lowering.trees import Tree
from sharding_rules.pipeline import Stages


def pipelined_gradients(
    program: ResolvedProgram, stages: Stages, state: Tree, batch: Tree, key: jax.Array
) -> tuple[Tree, jax.Array]:
    """Return gradients and loss of all microbatches, in which each target weighs the same.

    Args:
        program: Settings.
        stages: Division of the layers.
        state: Training state, its layers stored for the stages.
        batch: Arrays (microbatches, batch, seq).
        key: Random key of the step, for dropout.
    """
    total = jnp.maximum(batch["weights"].sum(), 1.0)
    batch = {**batch, "weights": batch["weights"] / total}
    model, count = program.model, program.batch.microbatches

    def score(logits: jax.Array, microbatch: Tree) -> tuple[jax.Array, jax.Array]:
        loss, squares = cross_entropy(logits, microbatch["targets"], microbatch["weights"])
        return loss + program.loss.z_loss * squares, loss

    keys = (lambda number: jax.random.fold_in(key, number)) if has_dropout(model) else None
    parts = pipeline(model, stages, score, keys, 1 / count, batch["tokens"])
    if program.pipeline.schedule == "1f1b":
        parameters = split_for_pipeline(model, state["parameters"])
        value, gradients = parts.value_and_gradients(parameters, batch)
        return merge_gradients(model, gradients, state["parameters"]), value.metrics

    def objective(parameters: Tree) -> PipelineLoss:
        return parts.value(split_for_pipeline(model, parameters), batch)

    (_, loss), gradients = jax.value_and_grad(objective, has_aux=True)(state["parameters"])
    return gradients, loss


def pipelined_loss(
    program: ResolvedProgram, stages: Stages, parameters: Tree, batch: Tree
) -> jax.Array:
    """Return the loss summed over the targets of one microbatch (batch, seq), without dropout."""

    def score(logits: jax.Array, microbatch: Tree) -> tuple[jax.Array, Any]:
        loss, _ = cross_entropy(logits, microbatch["targets"], microbatch["weights"])
        return loss, loss

    found = placement()
    assert found is not None
    # A mixture's sequences are not divided into smaller microbatches than those of training.
    whole = not is_imported(program.model) and program.model.moe is not None
    devices = len(batch["tokens"]) if whole else found.shape.size(mesh_axes_of("batch"))
    microbatches = split_batch(batch, stages.stages, devices)
    parts = pipeline(program.model, stages, score, None, 1.0, microbatches["tokens"])
    return parts.value(split_for_pipeline(program.model, parameters), microbatches).metrics
