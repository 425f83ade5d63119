"""Gradients and loss of a batch whose microbatches pass through a pipeline."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.graphs.loss_scale import loss_scale, scaled, unscaled
from graphtrain.graphs.open_model import open_language_model
from graphtrain.graphs.token_loss import weighted_loss
from graphtrain.models.pipeline_stages import split_batch
from lowering.pipeline.one_f_one_b import one_f_one_b_gradients
from lowering.pipeline.schedule import Pipeline, PipelineLoss
from lowering.pipeline.schedules import pipeline_loss
from lowering.tracing.constrain import mesh_axes_of, placement
from lowering.trees import Tree
from sharding_rules.pipeline import Stages


def pipelined_gradients(
    program: ResolvedProgram, stages: Stages, state: Tree, batch: Tree, key: jax.Array
) -> tuple[Tree, Tree]:
    """Return gradients and metrics of all microbatches, in which each target weighs the same.

    Gradients are multiplied by the loss scale, if there is one; the metrics are not.

    Args:
        program: Settings.
        stages: Division of the layers.
        state: Training state, its layers stored for the stages.
        batch: Arrays (microbatches, batch, seq).
        key: Random key of the step, for dropout.
    """
    pipeline, batch = training_pipeline(program, stages, state, batch, key)
    model, scale = open_language_model(program.model), loss_scale(program, state)
    if program.pipeline.schedule == "1f1b":
        parameters = model.split_for_pipeline(state["parameters"])
        value, gradients = one_f_one_b_gradients(pipeline, parameters, batch)
        merged = model.merge_gradients(gradients, state["parameters"])
        return merged, unscaled(metrics_by_name(value.metrics), scale)

    def objective(parameters: Tree) -> PipelineLoss:
        return pipeline_loss(pipeline, model.split_for_pipeline(parameters), batch)

    (_, metrics), gradients = jax.value_and_grad(objective, has_aux=True)(state["parameters"])
    return gradients, unscaled(metrics_by_name(metrics), scale)


def training_pipeline(
    program: ResolvedProgram, stages: Stages, state: Tree, batch: Tree, key: jax.Array
) -> tuple[Pipeline, Tree]:
    """Return the pipeline of a training step, and its batch with the weights of the objective.

    Arguments are those of `pipelined_gradients`.
    """
    scale = loss_scale(program, state)
    total = jnp.maximum(batch["weights"].sum(), 1.0)
    batch = {**batch, "weights": scaled(batch["weights"] / total, scale)}
    model, count = open_language_model(program.model), program.batch.microbatches

    def score(logits: jax.Array, microbatch: Tree) -> tuple[jax.Array, jax.Array]:
        return weighted_loss(program.loss, logits, microbatch["targets"], microbatch["weights"])

    keys = (
        (lambda microbatch_index: jax.random.fold_in(key, microbatch_index))
        if model.has_dropout
        else None
    )
    term_weight = scaled(1 / count, scale)
    pipeline = model.pipeline(stages, score, keys, term_weight, batch["tokens"])
    recompute = program.pipeline.recomputes_stages(program.model.remat)
    return replace(pipeline, remat=recompute), batch


def metrics_by_name(metrics: tuple[jax.Array, Tree]) -> Tree:
    """Return the metrics of a pipeline's last part and of its stages."""
    loss, of_stages = metrics
    return {"loss": loss, **of_stages}


def pipelined_loss(
    program: ResolvedProgram, stages: Stages, parameters: Tree, batch: Tree
) -> jax.Array:
    """Return the loss summed over the targets of one microbatch (batch, seq), without dropout."""

    def score(logits: jax.Array, microbatch: Tree) -> tuple[jax.Array, Any]:
        targets, weights = microbatch["targets"], microbatch["weights"]
        _, loss = weighted_loss(program.loss, logits, targets, weights)
        return loss, loss

    model, context = open_language_model(program.model), placement()
    assert context is not None
    # A mixture's sequences are not divided into smaller microbatches than those of training.
    devices = (
        len(batch["tokens"]) if model.mixes_sequences else context.shape.size(mesh_axes_of("batch"))
    )
    microbatches = split_batch(batch, stages.stages, devices)
    pipeline = model.pipeline(stages, score, None, 1.0, microbatches["tokens"])
    return pipeline_loss(pipeline, model.split_for_pipeline(parameters), microbatches).metrics[0]
