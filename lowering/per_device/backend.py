"""Lowering for compilers that take the program of one device: what their backends share.

Devices of the CPU stand in place of the target's: what is traced and partitioned is the same.
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
from lowering.per_device.normalise import Normalised, normalise
from lowering.xla import backend as xla
from lowering.xla.backend import Device
from lowering.xla.compiler_log import capture_compiler_log
from lowering.xla.spmd_module import partition_spmd
from sharding_rules.mesh import MeshShape
from sharding_rules.rules import Rules

# No public name reads a module (jax 0.11).
from jax._src.lib import xla_client as _client  # isort: skip # pyright: ignore

xla_client: Any = _client


def devices(target: Target) -> list[Device]:
    """As many devices of the CPU as the target has."""
    return xla.devices(Target("cpu", (target.devices,)))


@dataclass(frozen=True)
class OneDevice:
    """The program of one device, and what a loader has to know of it."""

    whole: Lowered  # the program of all of them
    normalised: Normalised
    facts: dict[str, Any]  # rank_input, temporaries_on_cpu, aliases

    def lowered(self, target: Target, platform: str, options: dict[str, Any]) -> Lowered:
        """For a compiler, with its options; the facts are in the record under its platform."""
        return replace(
            self.whole,
            text=text_of(self.normalised.hlo),
            target=target,
            facts=self.whole.facts | {platform: self.facts},
            options=options,
            handle=self.normalised,
        )


def lower(
    graph: Graph, rules: Rules, mesh_shape: MeshShape, target: Target, *, rank_input: bool = False
) -> OneDevice:
    """Trace a graph, split it, and take the program of one device in its normalised form.

    Args:
        rank_input: the rank is an input even of a program that does not ask for it.

    Raises:
        ShardingError: an array cannot be placed.
        LoweringError: the graph asks for what such a device does not have.
    """
    for path, spec in graph.arrays().items():
        if spec.memory != "device":
            raise LoweringError(
                f"{target}: {path} rests in the host's memory, which its programs do not reach; "
                "set program.optimizer.offload = false"
            )
    on_cpu = Target("cpu", (target.devices,))
    whole = xla.lower(graph, rules, mesh_shape, on_cpu, traced_for=target)
    return from_global_program(whole, target, rank_input=rank_input)


def from_global_program(whole: Lowered, target: Target, *, rank_input: bool = False) -> OneDevice:
    """Split the program of all devices, lowered for as many of the CPU.

    Raises:
        LoweringError: it asks for what such a device does not have.
    """
    with capture_compiler_log() as replicated:
        split = partition_spmd(whole.handle)
    normalised = normalise(split.hlo, name=whole.name, ranks=target.devices, rank_input=rank_input)
    _check_inputs(whole, normalised, target)
    aliases = read_module(normalised.hlo).input_output_alias.entries
    facts = {
        "rank_input": normalised.rank_input,
        "temporaries_on_cpu": split.temporaries,
        "aliases": [[next(iter(e.output_shape_index), 0), e.parameter_number] for e in aliases],
    }
    outputs = _split_outputs(whole, split.outputs)
    whole = replace(whole, facts=whole.facts | {"replicated": replicated, "outputs": outputs})
    return OneDevice(whole, normalised, facts)


def _split_outputs(whole: Lowered, shardings: Sequence[Any]) -> dict[str, Any]:
    """Outputs with how they are split, which for an imported program the partitioner decides."""
    outputs = dict(whole.facts["outputs"])
    for (path, fact), sharding in zip(outputs.items(), shardings, strict=True):
        if "split" not in fact:
            outputs[path] = fact | {"split": _split(sharding, len(fact["shape"]), path)}
    return outputs


def _split(sharding: Any, rank: int, path: str) -> list[list[str]]:
    if not isinstance(sharding, NamedSharding):
        raise LoweringError(f"{path} is split as {sharding}, along no axes of the mesh")
    parts = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
    return [[part] if isinstance(part, str) else list(part or ()) for part in parts]


def _check_inputs(whole: Lowered, normalised: Normalised, target: Target) -> None:
    """JAX leaves out inputs that a step does not use; a loader would then mistake the others."""
    given = len(normalised.inputs) - normalised.rank_input
    if given != len(whole.facts["inputs"]):
        raise LoweringError(
            f"{target}: the {whole.name} step uses {given} of its {len(whole.facts['inputs'])} "
            "input arrays; take out those that it does not use"
        )


def memory(normalised: Normalised, facts: dict[str, Any]) -> dict[str, int]:
    """Bytes on a device. Such compilers do not say what a program holds beside its inputs and
    outputs: the temporaries are those of XLA on a CPU."""
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


def text_of(hlo: bytes) -> str:
    """A module as HLO text, with its constants."""
    options = xla_client.hlo.HloPrintOptions()
    options.print_large_constants = True
    return xla_client.hlo.HloModule.from_serialized_hlo_module_proto(hlo).to_string(options)
