"""Transfers between a device and the memory of its host in a training step."""

from __future__ import annotations

from dataclasses import replace

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.saved_activations import saved_by_layers
from graphtrain.cost_model.tower import tower_program
from graphtrain.cost_model.weights import shard_weights


def exposed_seconds(program: ResolvedProgram, compute: float | None) -> float | None:
    """Return the seconds of transfers that compute does not hide; None if the speed is unknown.

    Activations go to the host while the forward pass computes and come back while the backward pass
    does: compiled programs for GPUs transfer them asynchronously. Moments come before the update,
    which waits for them, and go back after it.

    Args:
        program: the program.
        compute: Seconds of products and attention; None if unknown: then they hide nothing.
    """
    moments, activations = 2 * offloaded_moments(program), 2 * offloaded_activations(program)
    if not moments + activations:
        return 0.0
    one_way = program.target.specification.get("host_link", 0.0) / 2
    if not one_way:
        return None
    return moments / one_way + max(0.0, activations / one_way - (compute or 0.0))


def host_bytes(program: ResolvedProgram) -> int:
    """Return the bytes of host memory that a device's offloaded moments and activations need."""
    activations, pipeline = offloaded_activations(program), program.pipeline
    keeps_all = pipeline.schedule != "1f1b" and not pipeline.recomputes_stages(program.model.remat)
    if program.stages is None or not keeps_all:
        activations /= program.batch.microbatches
    return offloaded_moments(program) + round(activations)


def offloaded_moments(program: ResolvedProgram) -> int:
    """Return the bytes of a device's optimizer moments that are in host memory."""
    if not program.optimizer.offload_to_host:
        return 0
    tower = tower_program(program)
    of_tower = 0 if tower is None else offloaded_moments(tower)
    return sum(weight.moment_bytes for weight in shard_weights(program)) + of_tower


def offloaded_activations(program: ResolvedProgram) -> float:
    """Return the bytes of activations that a device moves to host memory in a step.

    They are what `remat = "dots"` saves beyond the input of each layer, of all microbatches.
    """
    if program.model.remat != "offload":
        return 0.0
    settings = program.settings
    saving = program.with_settings(replace(settings, model=replace(program.model, remat="dots")))
    of_microbatch = saved_by_layers(saving) - saved_by_layers(program)
    return program.batch.microbatches * of_microbatch
