"""A step that another program has traced: a module of HLO in place of a Graph.

What made it, as PyTorch/XLA, annotates arrays for GSPMD, and numbers its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from lowering import jax_xla
from lowering.errors import LoweringError
from lowering.jax_xla import Device
from lowering.lowered import Lowered
from lowering.one_device.proto import TYPE_NAMES, TYPES, Message, read_module, write_module
from lowering.target import Target
from sharding_rules.arrays import ArraySpec
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import Layout, Plan

# No public names read HLO or its shardings, or merge modules (jax 0.11).
from jax._src.interpreters.mlir import merge_mlir_modules  # isort: skip
from jax._src.lib import _jax as _jaxlib  # isort: skip # pyright: ignore
from jax._src.lib import xla_client as _client  # isort: skip # pyright: ignore
from jax._src.sharding_impls import parse_flatten_op_sharding  # isort: skip

jaxlib: Any = _jaxlib
xla_client: Any = _client

# HLO's names of what JAX calls otherwise; the others are as s64, which is int64.
_DTYPES = {"pred": "bool", "bf16": "bfloat16", "c64": "complex64", "c128": "complex128"}
_KINDS = {"s": "int", "u": "uint", "f": "float"}
_FLOAT8 = "f8e"


@dataclass(frozen=True)
class Imported:
    """A module of HLO, and the devices that its annotations speak of."""

    name: str
    hlo: bytes  # an HloModuleProto
    meshes: tuple[MeshShape, ...]  # along any of which it may be split, likeliest first


class _OtherMesh(Exception):
    """An array is not split along the axes of a mesh."""


def lower(imported: Imported, target: Target, placed_on: list[Device] | None = None) -> Lowered:
    """The module for XLA's own targets, with the shardings that it came with.

    Afterwards this process lowers for GSPMD, and numbers have 64 bits where they say so.

    Args:
        placed_on: devices in place of those that describe the target.

    Raises:
        LoweringError: it is no module, or is for another number of devices, or splits an array
            along none of its meshes.
    """
    module = read_module(imported.hlo)
    _drop_sources(module)
    _check_devices(imported, target)
    placed_on = placed_on or jax_xla.described_devices(target)
    plan = _plan(imported, module)
    # Annotations for GSPMD and those for Shardy do not go into one program.
    jax.config.update("jax_use_shardy_partitioner", False)
    jax.config.update("jax_enable_x64", True)
    outputs = _named("output", [_spec(shape) for shape in _results(module)])
    mesh = jax_xla.make_mesh(plan.mesh, placed_on)
    described = [
        jax.ShapeDtypeStruct(
            each.spec.shape, each.spec.dtype, sharding=NamedSharding(mesh, PartitionSpec(*each.split))
        )
        for each in plan.layouts.values()
    ]
    handle = jax.jit(_step(_stablehlo(module), outputs), keep_unused=True).lower(*described)
    return Lowered(
        name=imported.name,
        text=handle.as_text(),
        plan=plan,
        target=target,
        facts=_facts(imported, plan, outputs),
        options=jax_xla.options(target),
        handle=handle,
    )


def size_of(hlo: bytes) -> tuple[int, int]:
    """Instructions of a module, and inputs of its entry.

    Raises:
        LoweringError: it is no module.
    """
    module = read_module(hlo)
    instructions = sum(len(each.instructions) for each in module.computations)
    return instructions, len(_parameters(module))


def _drop_sources(module: Message) -> None:
    """Lines of the program that traced the module, and its number: they change no code."""
    for computation in module.computations:
        for instruction in computation.instructions:
            instruction.ClearField("metadata")
    module.ClearField("stack_frame_index")
    module.id = 0


def _check_devices(imported: Imported, target: Target) -> None:
    devices = imported.meshes[0].devices
    if devices != target.devices:
        raise LoweringError(
            f"{imported.name} is a program of {devices} devices, and {target} has "
            f"{target.devices}; give --target a machine of {devices}"
        )


def _parameters(module: Message) -> list[Message]:
    entry = next(each for each in module.computations if each.id == module.entry_computation_id)
    found = [each for each in entry.instructions if each.opcode == "parameter"]
    return sorted(found, key=lambda each: each.parameter_number)


def _results(module: Message) -> Sequence[Message]:
    """Shapes of the outputs; a single one is no tuple."""
    result = module.host_program_shape.result
    return result.tuple_shapes if result.element_type == TYPES["tuple"] else [result]


def _plan(imported: Imported, module: Message) -> Plan:
    """Where every input lives, along the first mesh that can say it."""
    problem: Exception | None = None
    for mesh in imported.meshes:
        try:
            layouts = [_layout(parameter, mesh) for parameter in _parameters(module)]
            return Plan(mesh, _named("input", layouts))
        except _OtherMesh as error:
            problem = error
    raise LoweringError(f"{imported.name}: {problem}; split all arrays along one mesh of devices")


def _layout(parameter: Message, mesh: MeshShape) -> Layout:
    spec = _spec(parameter.shape)
    if not parameter.sharding:
        return Layout(spec, ((),) * len(spec.shape))
    proto = xla_client.OpSharding()
    proto.ParseFromString(parameter.sharding)
    devices = AbstractMesh(tuple(mesh.axes.values()), tuple(mesh.axes))
    try:
        found = parse_flatten_op_sharding(proto, devices)[0]
    except (ValueError, KeyError, NotImplementedError, AssertionError, StopIteration):
        split = xla_client.HloSharding.from_proto(proto)
        raise _OtherMesh(
            f"input {parameter.parameter_number} of shape {spec.shape} is split as {split}, which "
            f"is not along axes of the mesh {mesh}"
        ) from None
    names = [(part,) if isinstance(part, str) else tuple(part or ()) for part in found]
    return Layout(spec, (*names, *((),) * (len(spec.shape) - len(names))))


def _spec(shape: Message) -> ArraySpec:
    sizes = tuple(shape.dimensions)
    return ArraySpec(sizes, (None,) * len(sizes), _dtype(TYPE_NAMES[shape.element_type]))


def _dtype(name: str) -> str:
    """JAX's name of a type of HLO: float32 of f32, float8_e4m3fn of f8e4m3fn."""
    if name.startswith(_FLOAT8):
        return f"float8_{name.removeprefix('f8')}"
    return _DTYPES.get(name) or f"{_KINDS[name[0]]}{name[1:]}"


def _named(what: str, values: Sequence[Any]) -> dict[str, Any]:
    """By name and number; sorted as strings they stay in order."""
    width = len(str(len(values)))
    return {f"{what}{index:0{width}}": value for index, value in enumerate(values)}


def _stablehlo(module: Message) -> str:
    computation = xla_client.XlaComputation(write_module(module))
    return jaxlib.mlir.xla_computation_to_mlir_module(computation)


def _step(stablehlo: str, outputs: Mapping[str, ArraySpec]) -> Callable[..., dict[str, Any]]:
    """A function of arrays that JAX traces into a call of the module."""
    call = Primitive("imported")
    call.multiple_results = True
    avals = [jax.core.ShapedArray(each.shape, jax.numpy.dtype(each.dtype)) for each in outputs.values()]
    call.def_abstract_eval(lambda *inputs: avals)

    def lowered(context: Any, *inputs: Any) -> Any:
        whole = context.module_context
        module = ir.Module.parse(stablehlo, whole.context)
        types = ir.SymbolTable(module.operation)["main"].type.results
        name = merge_mlir_modules(whole.module, "imported", module, dst_symtab=whole.symbol_table)
        return func.CallOp(types, ir.FlatSymbolRefAttr.get(name), inputs).results

    mlir.register_lowering(call, lowered)
    return lambda *inputs: dict(zip(outputs, call.bind(*inputs), strict=True))


def _facts(imported: Imported, plan: Plan, outputs: Mapping[str, ArraySpec]) -> dict[str, Any]:
    def about(spec: ArraySpec) -> dict[str, Any]:
        return {"shape": list(spec.shape), "dtype": spec.dtype, "memory": spec.memory}

    return {
        "graph": imported.name,
        "mesh": dict(plan.mesh.axes),
        "arguments": list(plan.layouts),
        "inputs": {
            path: about(layout.spec) | {"split": [list(names) for names in layout.split]}
            for path, layout in plan.layouts.items()
        },
        "outputs": {path: about(spec) for path, spec in outputs.items()},
        "donated": [],
        "annotations": [],
    }
