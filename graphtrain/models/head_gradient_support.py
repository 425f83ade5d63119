"""Programs that reduce the LM head's gradient before the layers' backward pass; no JAX here."""

from __future__ import annotations

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import is_imported


def reduces_head_first(program: ResolvedProgram) -> bool:
    """Return whether the gradient of the LM head is reduced before the layers' backward pass.

    Native models do that, except on CPUs and where the loss is computed in a shard_map: in
    pipelines, and with gradients that are reduced once for each step.
    """
    model = program.model
    if is_imported(model) or program.stands_for_imported or program.target.platform == "cpu":
        return False
    return program.stages is None and not defers_gradients(program)


def defers_gradients(program: ResolvedProgram) -> bool:
    """Return whether gradients are reduced over data once for each step, after a shard_map."""
    copies = program.mesh.axes.get("data", 1) if _splits_batch_over_data(program) else 1
    return program.batch.gradient_reduction == "per_step" and copies > 1


def _splits_batch_over_data(program: ResolvedProgram) -> bool:
    return "data" in program.rules.activations.get("batch", ())
