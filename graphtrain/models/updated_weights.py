"""Choice of the updated weights that are gathered layer by layer, with ZeRO; imports no JAX.

The update runs in the sharding of the optimizer state. XLA gathers the new weights of all layers at
once, to new arrays in another order of dimensions than the weights have, beside the stored ones.
`graphs.gathered_updates` gathers one layer at a time, to where the stored weights are. Bytes and
products are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.models.shapes import STACKS
from sharding_rules.arrays import ArraySpec, Role
from sharding_rules.plan import ArrayLayout, make_layout

UPDATE_SCOPE = "updated_weights"  # name scope of the loop over layers
# The loop starts a collective for each layer in place of one for all. That is worth it from this
# fraction of a device's memory: at 5 microseconds each, 32 layers of 7 matrices take 1.1 ms more,
# if XLA combines none of them; to gather a 256th of an H100 at its 450 GB/s takes 0.7 ms.
_MIN_SAVING = 1 / 256


def gathered_by_layer(
    program: ResolvedProgram, arrays: Mapping[str, ArraySpec]
) -> dict[str, ArraySpec]:
    """Return the trained arrays whose updated values are gathered layer by layer, by path.

    There are none on CPUs, whose memory is rarely short, nor where it would save too little.

    Args:
        program: The program.
        arrays: ArraySpecs of the trained arrays, by path.
    """
    target = program.target
    if not (target.is_gpu or target.platform == "tpu"):
        return {}
    stacks = gathered_stacks(program, arrays)
    saved_bytes = sum(
        spec.nbytes / program.mesh.size(_axes(_layout(program, path, spec, "parameter")))
        for path, spec in stacks.items()
    )
    return stacks if saved_bytes >= _MIN_SAVING * target.memory_bytes else {}


def gathered_stacks(
    program: ResolvedProgram, arrays: Mapping[str, ArraySpec]
) -> dict[str, ArraySpec]:
    """Return the arrays of matrices of layers that are sharded further in updates than stored.

    Args:
        program: The program.
        arrays: ArraySpecs of the trained arrays, by path.
    """
    return {path: spec for path, spec in arrays.items() if _is_gathered(program, path, spec)}


def _is_gathered(program: ResolvedProgram, path: str, spec: ArraySpec) -> bool:
    if len(spec.shape) < 3 or spec.axes[0] not in STACKS or spec.shape[0] == 1:
        return False
    stored = _layout(program, path, spec, "parameter")
    updated = _layout(program, path, spec, "optimizer")
    return set(_axes(updated)) > set(_axes(stored)) and not updated.split[0]


def _layout(program: ResolvedProgram, path: str, spec: ArraySpec, role: Role) -> ArrayLayout:
    return make_layout(f"{role}/{path}", replace(spec, role=role), program.rules, program.mesh)


def _axes(layout: ArrayLayout) -> tuple[str, ...]:
    return tuple(name for names in layout.split for name in names)
