"""Gradients and loss of a batch whose microbatches pass through a pipeline."""

import jax

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.graphs.loss_scale import loss_scale, unscaled
from graphtrain.graphs.open_model import open_language_model
from graphtrain.graphs.pipeline_objectives import evaluation_pipeline, training_pipeline
from graphtrain.graphs.pipeline_weights import part_weights
from graphtrain.models.pipeline_stages import split_batch
from lowering.pipeline.one_f_one_b import one_f_one_b_gradients
from lowering.pipeline.schedule import PipelineLoss
from lowering.pipeline.schedules import pipeline_loss
from lowering.tracing.constrain import mesh_axes_of, placement
from lowering.trees import Tree
from sharding_rules.pipeline import Stages


def pipelined_gradients(
    program: ResolvedProgram,
    stages: Stages,
    state: Tree,
    frozen: Tree | None,
    batch: Tree,
    key: jax.Array,
) -> tuple[Tree, Tree]:
    """Return gradients and metrics of all microbatches; each target, or pair, weighs the same.

    Gradients are multiplied by the loss scale, if there is one; the metrics are not.

    Args:
        program: Settings.
        stages: Division of the layers.
        state: Training state, its layers stored for the stages.
        frozen: Frozen weights, if any, stored alike.
        batch: Arrays (microbatches, batch, seq).
        key: Random key of the step, for dropout.
    """
    pipeline, batch = training_pipeline(program, stages, state, batch, key)
    model, scale = open_language_model(program.model), loss_scale(program, state)
    if program.pipeline.schedule == "1f1b":
        parameters = part_weights(model, state["parameters"], frozen)
        value, gradients = one_f_one_b_gradients(pipeline, parameters, batch)
        merged = model.merge_gradients(gradients, state["parameters"])
        return merged, unscaled(metrics_by_name(value.metrics), scale)

    def objective(trained: Tree) -> PipelineLoss:
        return pipeline_loss(pipeline, part_weights(model, trained, frozen), batch)

    (_, metrics), gradients = jax.value_and_grad(objective, has_aux=True)(state["parameters"])
    return gradients, unscaled(metrics_by_name(metrics), scale)


def metrics_by_name(metrics: tuple[Tree, Tree]) -> Tree:
    """Return the metrics of a pipeline's last part and of its stages."""
    of_last, of_stages = metrics
    return {**of_last, **of_stages}


def pipelined_loss(
    program: ResolvedProgram, stages: Stages, parameters: Tree, frozen: Tree | None, batch: Tree
) -> jax.Array:
    """Return the loss of one microbatch (batch, seq), without dropout.

    It is summed over targets; for DPO, over pairs.
    """
    model, context = open_language_model(program.model), placement()
    assert context is not None
    # A mixture's sequences are not divided into smaller microbatches than those of training.
    devices = (
        len(batch["tokens"]) if model.mixes_sequences else context.shape.size(mesh_axes_of("batch"))
    )
    rows = 2 * devices if program.loss.kind == "dpo" else devices  # both answers of a pair
    microbatches = split_batch(batch, stages.stages, rows)
    pipeline, microbatches = evaluation_pipeline(program, stages, microbatches)
    weights = part_weights(model, parameters, frozen)
    return metrics_by_name(pipeline_loss(pipeline, weights, microbatches).metrics)["loss"]
