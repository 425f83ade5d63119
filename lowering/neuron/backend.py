"""The backend of Trainium: what lowering.jax_xla is to XLA's own targets."""

import hashlib
from dataclasses import replace
from typing import Any

import jax

from lowering import collectives, jax_xla
from lowering.artifact import Artifact
from lowering.errors import LoweringError
from lowering.graph import Graph
from lowering.jax_xla import (
    Device,
    Executable,
    fill,
    forbid_tracing,
    make_mesh,
    memory_in_use,
    peak_memory,
    plan_graph,
    put,
)
from lowering.lowered import Lowered
from lowering.neuron import bundle, compiler, neff, preflight, simulation
from lowering.neuron.device import DeviceArray, Program
from lowering.neuron.normalise import Normalised, normalise
from lowering.neuron.proto import array_bytes, read_module
from lowering.overheard import overhear
from lowering.partitioned import partition
from lowering.target import Target
from lowering.trees import Tree
from sharding_rules.mesh import MeshShape
from sharding_rules.rules import Rules

__all__ = [
    "compile",
    "described_devices",
    "devices",
    "fill",
    "forbid_tracing",
    "load",
    "lower",
    "make_mesh",
    "memory_in_use",
    "peak_memory",
    "plan_graph",
    "put",
    "storable",
]


def described_devices(target: Target) -> list[Device]:
    """Devices of the CPU in place of the target's: what is traced and partitioned is the same."""
    return jax_xla.devices(_host(target))


def devices(target: Target) -> list[Device]:
    """The devices that hold a run's arrays: of the CPU, on which a simulation also computes."""
    return jax_xla.devices(_host(target))


def _host(target: Target) -> Target:
    return Target("cpu", (target.devices,))


def lower(graph: Graph, rules: Rules, mesh_shape: MeshShape, target: Target) -> Lowered:
    """Trace a graph, split it, and take the program of one device in its normalised form.

    Raises:
        ShardingError: an array cannot be placed.
        LoweringError: the graph asks for what a Neuron device does not have.
    """
    for path, spec in graph.arrays().items():
        if spec.memory != "device":
            raise LoweringError(
                f"{target}: {path} rests in the host's memory, which no Neuron program reaches; "
                "set program.optimizer.offload = false"
            )
    whole = jax_xla.lower(graph, rules, mesh_shape, _host(target))
    with overhear() as replicated:
        one_device = partition(whole.handle)
    normalised = normalise(one_device.hlo, name=graph.name, ranks=target.devices)
    _check_inputs(whole, normalised, target)
    found = compiler.find(target)
    version = found.version if found else compiler.NEWEST
    options = {
        "hlo": hashlib.sha256(normalised.hlo).hexdigest(),
        "flags": compiler.flags(target, version, quickly=graph.runs_once),
        "compiler": found.version if found else None,
    }
    facts = {"replicated": replicated, "neuron": _facts(normalised, one_device.temporaries)}
    return replace(
        whole,
        text=simulation.text_of(normalised.hlo),
        target=target,
        facts=whole.facts | facts,
        options=options,
        handle=normalised,
    )


def _check_inputs(whole: Lowered, normalised: Normalised, target: Target) -> None:
    """JAX leaves out inputs that a step does not use; a loader would then mistake the others."""
    given = len(normalised.inputs) - normalised.rank_input
    if given != len(whole.facts["inputs"]):
        raise LoweringError(
            f"{target}: the {whole.name} step uses {given} of its {len(whole.facts['inputs'])} "
            "input arrays; take out those that it does not use"
        )


def _facts(normalised: Normalised, temporaries: int) -> dict[str, Any]:
    """What a loader has to know of the module, and what its record could not say later."""
    aliases = read_module(normalised.hlo).input_output_alias.entries
    return {
        "rank_input": normalised.rank_input,
        "temporaries_on_cpu": temporaries,
        "aliases": [[next(iter(e.output_shape_index), 0), e.parameter_number] for e in aliases],
    }


def compile(lowered: Lowered) -> Artifact:
    """Compile with neuronx-cc, or with the simulator; the record says what a loader checks.

    Raises:
        CompilerMissing: neuronx-cc is not here; the error holds a bundle for where it is.
        OutOfMemory: the program does not fit the device.
        LoweringError: the compiler refused it.
    """
    target, hlo, flags = lowered.target, lowered.handle.hlo, lowered.options["flags"]
    memory = _memory(lowered)
    checked = preflight.check(
        hlo, lowered.handle.sources, lowered.name, target, flags, peak=memory["peak"]
    )
    record = _record(lowered, memory, checked)
    found = compiler.find(target)
    if found is None:
        raise bundle.unfinished(hlo, flags, record, target)
    payload, seconds = compiler.timed(found, hlo, flags, graph=lowered.name, target=target)
    return Artifact(payload, bundle.completed(record, payload, seconds, flags, found.version))


def _record(lowered: Lowered, memory: dict[str, int], checked: dict[str, Any]) -> dict[str, Any]:
    """What is known of a program before it is compiled."""
    target = lowered.target
    about = {
        "target": str(target),
        "stablehlo_bytes": len(lowered.text),
        "memory": memory,
        "neuron": lowered.facts["neuron"] | {"preflight": checked},
        **collectives.read(lowered.text, lowered.plan.mesh).to_record(),
    }
    if target.on_host:
        about["fingerprint"] = jax_xla.fingerprint(devices(target))
    return lowered.facts | about


def _memory(lowered: Lowered) -> dict[str, int]:
    """Bytes on a device. neuronx-cc does not say what a NEFF holds beside its inputs and outputs:
    the temporaries are those of XLA on a CPU."""
    shape = read_module(lowered.handle.hlo).host_program_shape
    inputs = [array_bytes(each) for each in shape.parameters]
    outputs = [array_bytes(each) for each in shape.result.tuple_shapes]
    facts = lowered.facts["neuron"]
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


def load(artifact: Artifact, target: Target) -> Executable:
    """Load a compiled program; the payload must already have been checked against its digest.

    Raises:
        LoweringError: it was made for another machine, or this one has no Neuron runtime.
    """
    about = artifact.record
    neff.check(
        artifact.payload, simulated=target.on_host, what=f"the compiled {about['graph']} step"
    )
    placed_on = devices(target)
    mesh = make_mesh(MeshShape(about["mesh"]), placed_on)
    if not target.on_host:
        return Executable(Program(artifact.payload, about, mesh), about, mesh)
    jax_xla.check_fingerprint(about, placed_on)
    _, executable = neff.unpack(artifact.payload)
    loaded = simulation.load_module(executable, placed_on)
    return Executable(simulation.Program(loaded, about, mesh), about, mesh)


def storable(tree: Tree) -> Tree:
    """What a checkpoint can write: arrays of Neuron devices as copies in the host's memory."""
    return jax.tree.map(
        lambda leaf: leaf.to_host() if isinstance(leaf, DeviceArray) else leaf, tree
    )
