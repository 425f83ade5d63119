"""Lowering to the program of one device, shared by the backends of Neuron and Ascend.

CPU devices represent the target's devices: tracing and partitioning give the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import NamedSharding

from lowering.errors import LoweringError
from lowering.graph import Graph
from lowering.hlo.proto import array_bytes, read_module
from lowering.lowered import Lowered
from lowering.machine.target import Target
from lowering.per_device.normalize import NormalizedModule, normalize_module
from lowering.xla import backend as xla
from lowering.xla import private
from lowering.xla.compiler_log import capture_compiler_log
from lowering.xla.devices import Device
from lowering.xla.spmd_module import partition_spmd
from sharding_rules.mesh import MeshShape
from sharding_rules.rules import Rules


def devices(target: Target) -> list[Device]:
    """Return as many CPU devices as the target has devices."""
    return xla.devices(Target("cpu", (target.devices,)))


@dataclass(frozen=True)
class DeviceLowering:
    """The program of one device, with the facts that its loader needs."""

    global_program: Lowered  # the global program, for all devices
    normalised: NormalizedModule
    facts: dict[str, Any]  # rank_input, temporaries_on_cpu, aliases

    def lowered(self, target: Target, platform: str, options: dict[str, Any]) -> Lowered:
        """Return the lowered program for a compiler; the facts are recorded under `platform`."""
        return replace(
            self.global_program,
            text=private.hlo_text(self.normalised.hlo),
            target=target,
            facts=self.global_program.facts | {platform: self.facts},
            options=options,
            handle=self.normalised,
        )


def lower(
    graph: Graph, rules: Rules, mesh_shape: MeshShape, target: Target, *, rank_input: bool = False
) -> DeviceLowering:
    """Trace and partition a graph, and normalise the program of one device.

    Args:
        graph: the graph to lower.
        rules: sharding rules for the graph's arrays.
        mesh_shape: mesh axes and their sizes.
        target: machine to compile for.
        rank_input: add the rank as an input even if the program does not use it.

    Raises:
        ShardingError: an array cannot be sharded by the rules.
        LoweringError: the graph needs a feature that the target's devices do not have.
    """
    for path, spec in graph.arrays().items():
        if spec.memory != "device":
            raise LoweringError(
                f"{target}: {path} is stored in host memory, which programs of this target cannot "
                "access; set program.optimizer.offload_to_host = false"
            )
    on_cpu = Target("cpu", (target.devices,))
    global_program = xla.lower(graph, rules, mesh_shape, on_cpu, traced_for=target)
    return from_global_program(global_program, target, rank_input=rank_input)


def from_global_program(
    program: Lowered, target: Target, *, rank_input: bool = False
) -> DeviceLowering:
    """Partition a global program that was lowered for as many CPU devices as the target has.

    Raises:
        LoweringError: the program needs a feature that the target's devices do not have.
    """
    with capture_compiler_log() as replicated:
        split = partition_spmd(program.handle)
    normalised = normalize_module(
        split.hlo, name=program.name, ranks=target.devices, rank_input=rank_input
    )
    _check_inputs(program, normalised, target)
    aliases = read_module(normalised.hlo).input_output_alias.entries
    facts = {
        "rank_input": normalised.rank_input,
        "temporaries_on_cpu": split.temporaries,
        "aliases": [[next(iter(e.output_shape_index), 0), e.parameter_number] for e in aliases],
    }
    outputs = _output_shardings(program, split.outputs)
    program = replace(program, facts=program.facts | {"replicated": replicated, "outputs": outputs})
    return DeviceLowering(program, normalised, facts)


def _output_shardings(lowered: Lowered, shardings: Sequence[Any]) -> dict[str, Any]:
    """Return the outputs with their sharding; the partitioner chooses it for imported programs."""
    outputs = dict(lowered.facts["outputs"])
    for (path, fact), sharding in zip(outputs.items(), shardings, strict=True):
        if "split" not in fact:
            outputs[path] = fact | {"split": _spec_of(sharding, len(fact["shape"]), path)}
    return outputs


def _spec_of(sharding: Any, rank: int, path: str) -> list[list[str]]:
    if not isinstance(sharding, NamedSharding):
        raise LoweringError(f"{path} is sharded as {sharding}, which uses no mesh axes by name")
    dim_axes = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
    return [[axes] if isinstance(axes, str) else list(axes or ()) for axes in dim_axes]


def _check_inputs(lowered: Lowered, normalised: NormalizedModule, target: Target) -> None:
    """Raise an error if JAX dropped unused inputs, since a loader would then mix up the others."""
    input_count = len(normalised.inputs) - normalised.rank_input
    if input_count != len(lowered.facts["inputs"]):
        raise LoweringError(
            f"{target}: the {lowered.name} step uses {input_count} of its "
            f"{len(lowered.facts['inputs'])} input arrays; remove those that it does not use"
        )


def memory(normalised: NormalizedModule, facts: dict[str, Any]) -> dict[str, int]:
    """Return the memory use per device in bytes, by category.

    These compilers do not report the temporaries of a program, so those of XLA on a CPU are used.
    """
    shape = read_module(normalised.hlo).host_program_shape
    inputs = [array_bytes(each) for each in shape.parameters]
    outputs = [array_bytes(each) for each in shape.result.tuple_shapes]
    aliased = sum(outputs[output] for output, _ in facts["aliases"])
    temporaries = facts["temporaries_on_cpu"]
    return {
        "arguments": sum(inputs),
        "outputs": sum(outputs),
        "aliased": aliased,
        "temporaries": temporaries,
        "code": 0,
        "host": 0,
        "peak": sum(inputs) + sum(outputs) - aliased + temporaries,
    }
