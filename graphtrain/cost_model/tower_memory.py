"""Memory of a training step with a vision tower, from that of its two models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.assessment import Memory
from graphtrain.cost_model.tower import feature_bytes, projection_arrays
from graphtrain.models.optimizer_state import optimizer_arrays
from sharding_rules.arrays import ArraySpec
from sharding_rules.plan import make_layout


def with_projection(tower: Memory, program: ResolvedProgram) -> Memory:
    """Return the memory of a tower with that of its projection and of its idle blocks.

    Blocks that are not computed have optimizer state, which stays zero, but no gradients.
    """
    assert program.tower is not None
    arrays = projection_arrays(program.tower)
    weights = _bytes("state/parameters", arrays, program)
    idle = program.tower.idle_layers / program.tower.model.layers
    if program.adapter is not None:
        return _with_frozen_projection(tower, program, arrays, idle)
    moments = _bytes("state/optimizer", optimizer_arrays(arrays, program.optimizer), program)
    on_device = 0 if program.optimizer.offload_to_host else moments
    return replace(
        tower,
        parameters=tower.parameters + weights + round(idle * tower.parameters),
        optimizer=tower.optimizer + on_device + round(idle * tower.optimizer),
        gradients=tower.gradients + weights,
    )


def _with_frozen_projection(
    tower: Memory, program: ResolvedProgram, arrays: Mapping[str, ArraySpec], idle: float
) -> Memory:
    """Return the memory of a tower with a projection of which an adapter trains some matrices.

    Idle blocks are frozen, also where the others are trained in full.
    """
    assert program.tower is not None
    paths = [*arrays]
    trained = {paths[index]: arrays[paths[index]] for index in program.tower.trained_projection}
    weights = _bytes("state/parameters", trained, program)
    moments = _bytes("state/optimizer", optimizer_arrays(trained, program.optimizer), program)
    blocks = tower.frozen + (tower.parameters if program.tower.trained else 0)
    all_weights = _bytes("state/parameters", arrays, program)
    return replace(
        tower,
        parameters=tower.parameters + weights,
        optimizer=tower.optimizer + (0 if program.optimizer.offload_to_host else moments),
        gradients=tower.gradients + weights,
        frozen=tower.frozen + all_weights - weights + round(idle * blocks),
    )


def _bytes(prefix: str, arrays: Mapping[str, ArraySpec], program: ResolvedProgram) -> int:
    mesh = program.mesh
    layouts = (
        make_layout(f"{prefix}/{path}", spec, program.rules, mesh) for path, spec in arrays.items()
    )
    return sum(
        layout.spec.nbytes // math.prod(mesh.size(names) for names in layout.split)
        for layout in layouts
    )


def with_tower(
    program: ResolvedProgram, language: Memory, tower: Memory, gradients: float
) -> Memory:
    """Return the memory of a step with a vision tower.

    While the language model's backward pass runs, the tower has saved its activations, and with
    several microbatches its gradients are summed. After it, the gradients of the language model
    exist beside all arrays of the tower.

    Args:
        program: the program.
        language: memory of the language model.
        tower: memory of the tower with its projection.
        gradients: bytes of all gradients of the language model.
    """
    sums = tower.gradients if program.batch.microbatches > 1 else 0
    saved = tower.activations + round(feature_bytes(program))
    in_language = language.gradients + sums, language.activations + saved, language.temporaries
    in_tower = round(gradients) + tower.gradients, saved, tower.temporaries
    of_gradients, activations, temporaries = max(in_language, in_tower, key=sum)
    parameters = language.parameters + tower.parameters
    frozen, optimizer = language.frozen + tower.frozen, language.optimizer + tower.optimizer
    state = parameters + frozen + optimizer
    return replace(
        language,
        parameters=parameters,
        frozen=frozen,
        optimizer=optimizer,
        gradients=of_gradients,
        activations=activations,
        temporaries=temporaries,
        peak=state + of_gradients + activations + temporaries,
    )
