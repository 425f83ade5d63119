"""Imported step: an HLO module traced by another program, used in place of a Graph.

The other program, for example PyTorch/XLA, annotates arrays for GSPMD; inputs and outputs have
positions instead of names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
from jax.core import ShapedArray
from jax.sharding import NamedSharding, PartitionSpec

import lowering
from lowering.errors import LoweringError
from lowering.hlo.module import HloModule, Input
from lowering.lowered import Lowered
from lowering.machine.target import Target
from lowering.xla import backend as xla
from lowering.xla import private
from sharding_rules.arrays import ArraySpec
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import ArrayLayout, Plan


@dataclass(frozen=True)
class ImportedHlo:
    """An HLO module and the candidate meshes for its sharding annotations."""

    name: str
    module: HloModule
    meshes: tuple[MeshShape, ...]  # meshes that may describe its shardings, likeliest first


class _ShardingMismatch(Exception):
    """The sharding of an array does not follow the axes of a mesh."""


def lower(imported: ImportedHlo, target: Target) -> Lowered:
    """Lower an imported module for a target, with the module's own shardings.

    This changes JAX's configuration of the process: GSPMD instead of Shardy, 64-bit types enabled.

    Raises:
        LoweringError: the module is for another number of devices, an array's sharding follows
            none of its meshes, or the target does not support it.
    """
    devices = imported.meshes[0].devices
    if devices != target.devices:
        raise LoweringError(
            f"{imported.name} was traced for {devices} devices, but {target} has "
            f"{target.devices}; choose a target with {devices} devices"
        )
    backend = lowering.backend(target)
    if backend is xla:
        return _lower_xla(imported, target)
    if not hasattr(backend, "from_global_program"):
        raise LoweringError(
            f"the backend of {target} does not compile programs that another program traced; "
            "choose another target"
        )
    backend = cast(lowering.GlobalProgramBackend, backend)
    return backend.from_global_program(_lower_xla(imported, Target("cpu", (devices,))), target)


def _lower_xla(imported: ImportedHlo, target: Target) -> Lowered:
    """Lower the module for XLA, as one program for all devices."""
    placed_on = xla.compile_devices(target)
    # GSPMD and Shardy annotations cannot be mixed in one program.
    jax.config.update("jax_use_shardy_partitioner", False)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_traceback_in_locations_limit", 0)  # they would point to this file
    plan, outputs = _plan(imported), _numbered("output", imported.module.outputs)
    mesh, layouts = xla.make_mesh(plan.mesh, placed_on), plan.layouts.values()
    described = [
        jax.ShapeDtypeStruct(
            layout.spec.shape,
            layout.spec.dtype,
            sharding=NamedSharding(mesh, PartitionSpec(*layout.split)),
        )
        for layout in layouts
    ]
    jitted = jax.jit(
        _step(imported.module, outputs), keep_unused=True, donate_argnums=imported.module.donated
    )
    handle = jitted.lower(*described)
    facts = _facts(imported, plan, outputs)
    options = xla.compiler_options(target)
    return Lowered(imported.name, handle.as_text(), plan, target, facts, options, handle)


def _plan(imported: ImportedHlo) -> Plan:
    """Return the layout of every input, on the first mesh that can express all of them."""
    problem: Exception | None = None
    for mesh in imported.meshes:
        try:
            layouts = [_layout(each, mesh) for each in imported.module.inputs]
            return Plan(mesh, _numbered("input", layouts))
        except _ShardingMismatch as error:
            problem = error
    raise LoweringError(f"{imported.name}: {problem}; shard all arrays along axes of one mesh")


def _layout(array: Input, mesh: MeshShape) -> ArrayLayout:
    rank = len(array.spec.shape)
    if not array.sharding:
        return ArrayLayout(array.spec, ((),) * rank)
    try:
        split_axes = private.sharding_axes(array.sharding, mesh.axes)
    except ValueError as sharding:
        raise _ShardingMismatch(
            f"an input of shape {array.spec.shape} has sharding {sharding}, which does not follow "
            f"the axes of the mesh {mesh}"
        ) from None
    return ArrayLayout(array.spec, (*split_axes, *((),) * (rank - len(split_axes))))


def _numbered(prefix: str, values: Sequence[Any]) -> dict[str, Any]:
    """Return values by name and zero-padded index, so that sorting the names keeps the order."""
    width = len(str(len(values) - 1))
    return {f"{prefix}{index:0{width}}": value for index, value in enumerate(values)}


def _step(module: HloModule, outputs: Mapping[str, ArraySpec]) -> Callable[..., dict[str, Any]]:
    """Return a function of arrays that JAX traces into a call of the module."""
    avals = [ShapedArray(each.shape, jax.numpy.dtype(each.dtype)) for each in outputs.values()]
    call = private.stablehlo_function(module.binary, avals)

    def step(*inputs: jax.Array) -> dict[str, jax.Array]:
        return dict(zip(outputs, call(*inputs), strict=True))

    return step


def _facts(imported: ImportedHlo, plan: Plan, outputs: Mapping[str, ArraySpec]) -> dict[str, Any]:
    def about(spec: ArraySpec) -> dict[str, Any]:
        return {"shape": list(spec.shape), "dtype": spec.dtype, "memory": spec.memory}

    names = list(plan.layouts)
    return {
        "graph": imported.name,
        "mesh": dict(plan.mesh.axes),
        "arguments": names,
        "inputs": {
            path: about(layout.spec) | {"split": [list(axes) for axes in layout.split]}
            for path, layout in plan.layouts.items()
        },
        # The compiler chooses the shardings of the outputs.
        "outputs": {path: about(spec) for path, spec in outputs.items()},
        "donated": [names[index] for index in imported.module.donated],
        "annotations": [],
    }
