"""Named activations, and their gradients, of a training step whose microbatches pass a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.graphs.loss_scale import loss_scale, unscaled
from graphtrain.graphs.open_model import open_language_model
from graphtrain.graphs.pipeline_objectives import training_pipeline
from graphtrain.graphs.pipeline_weights import part_weights
from graphtrain.graphs.pipelined import metrics_by_name
from lowering.pipeline.one_f_one_b import recorded_one_f_one_b
from lowering.pipeline.recorded import RecordedParts, Wanted
from lowering.pipeline.schedules import recorded_pipeline_loss
from lowering.tracing.constrain import constrain
from lowering.tracing.recording import Recorded, RecordedArray
from lowering.trees import Tree
from sharding_rules.pipeline import Stages


def recorded_gradients(
    program: ResolvedProgram,
    stages: Stages,
    state: Tree,
    frozen: Tree | None,
    batch: Tree,
    key: jax.Array,
    described: Mapping[str, RecordedArray],
    values: Collection[str],
    gradients: Collection[str],
) -> tuple[Tree, Tree, Recorded, Recorded]:
    """Return gradients and metrics as `pipelined_gradients`, activations, and their gradients.

    Arrays have a leading dimension of microbatches; those of layers, then one of all layers in
    order. Gradients with respect to activations are multiplied by the loss scale.

    Args:
        program: settings.
        stages: division of the layers.
        state: training state, its layers stored for the stages.
        frozen: frozen weights, if any, stored alike.
        batch: arrays (microbatches, batch, seq).
        key: random key of the step.
        described: activations of one microbatch without stages, in the order of execution.
        values: names of the activations to return.
        gradients: names of those whose gradients are returned.
    """
    pipeline, batch = training_pipeline(program, stages, state, batch, key)
    pipeline = replace(pipeline, wanted=Wanted(lambda name: name in values, gradients))
    model, scale = open_language_model(program.model), loss_scale(program, state)
    parameters = state["parameters"]
    if program.pipeline.schedule == "1f1b":
        parts = part_weights(model, parameters, frozen)
        value, of_parts, forward, backward = recorded_one_f_one_b(pipeline, parts, batch)
        of_parameters, metrics = model.merge_gradients(of_parts, parameters), value.metrics
    else:

        def objective(trained: Tree, slots: RecordedParts) -> tuple[jax.Array, tuple]:
            parts = part_weights(model, trained, frozen)
            loss, recorded = recorded_pipeline_loss(pipeline, parts, batch, slots)
            return loss.objective, (loss, recorded)

        slots = _slots(stages, program.batch.microbatches, described, gradients)
        differentiate = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
        (_, (value, forward)), (of_parameters, backward) = differentiate(parameters, slots)
        metrics = value.metrics
    metrics = unscaled(metrics_by_name(metrics), scale)
    return of_parameters, metrics, _joined(stages, forward), _joined(stages, backward)


def layers_of_rows(stages: Stages, array: jax.Array) -> jax.Array:
    """Return the layers in order of an array whose rows are stored for the stages."""
    leading = 2 if stages.rounds > 1 else 1
    rows = array.reshape(len(stages.rows), *array.shape[leading:])
    return rows[_rows(stages)]


def _rows(stages: Stages) -> np.ndarray:
    """Return the row of each layer."""
    return np.array([stages.rows.index(layer) for layer in range(sum(stages.layers))])


def _joined(stages: Stages, parts: RecordedParts) -> Recorded:
    """Return the arrays of all parts; of the rows of all chunks, the layers in order."""
    of_layers = {
        name: array.reshape(len(array), -1, *array.shape[3:])[:, _rows(stages)]
        for name, array in parts.stages.items()
    }
    return {**parts.first, **of_layers, **parts.last}


def _slots(
    stages: Stages,
    microbatches: int,
    described: Mapping[str, RecordedArray],
    names: Collection[str],
) -> RecordedParts:
    """Return zeros for activations whose gradients are wanted."""
    first, of_stages, last = {}, {}, {}
    part, chunks = first, len(stages.layers)
    for name, one in described.items():  # in the order of execution
        shape: tuple[int, ...] = (microbatches, *one.shape)
        axes: tuple[str | None, ...] = (None, *one.axes)
        if one.layers is not None:
            shape = (microbatches, chunks, stages.rows_per_chunk, *one.shape[1:])
            axes, part = (None, None, *one.axes), last
        if name in names:
            target = part if one.layers is None else of_stages
            target[name] = constrain(jnp.zeros(shape, one.dtype), *axes)
    return RecordedParts(first, of_stages, last)
