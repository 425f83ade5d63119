"""Trainium backend: the counterpart of lowering.xla.backend, which serves XLA's own targets."""

import hashlib
from typing import Any

import jax

from lowering.artifact import Artifact
from lowering.graph import Graph
from lowering.hlo import collectives
from lowering.lowered import Lowered
from lowering.machine.target import Target
from lowering.neuron import (
    bundle,
    compiler,
    compiler_choice,
    compiler_flags,
    neff,
    preflight,
    simulation,
)
from lowering.neuron.device import CoreArray, NeffProgram
from lowering.per_device import backend as per_device
from lowering.per_device.backend import DeviceLowering
from lowering.trees import Tree
from lowering.xla.arrays import from_shards, to_devices
from lowering.xla.backend import forbid_tracing, plan_graph
from lowering.xla.devices import Device, fingerprint, make_mesh, memory_in_use, peak_memory
from lowering.xla.executable import Executable, check_fingerprint
from sharding_rules.mesh import MeshShape
from sharding_rules.rules import Rules

__all__ = [
    "checkpoint_arrays",
    "compile",
    "compile_devices",
    "devices",
    "forbid_tracing",
    "from_global_program",
    "from_shards",
    "load",
    "lower",
    "make_mesh",
    "memory_in_use",
    "peak_memory",
    "plan_graph",
    "to_devices",
]


def compile_devices(target: Target) -> list[Device]:
    """Return CPU devices, one for each target device, for tracing and partitioning a graph."""
    return per_device.devices(target)


def devices(target: Target) -> list[Device]:
    """Return the CPU devices that hold a run's arrays; neuron-sim also computes on them."""
    return per_device.devices(target)


def lower(graph: Graph, rules: Rules, mesh_shape: MeshShape, target: Target) -> Lowered:
    """Lower a graph to the program of one device, with the compiler's flags as options.

    Raises:
        ShardingError: see `per_device.lower`.
        LoweringError: see `per_device.lower`.
    """
    program = per_device.lower(graph, rules, mesh_shape, target)
    return _with_compiler_flags(program, target, fast=graph.runs_once)


def from_global_program(program: Lowered, target: Target) -> Lowered:
    """Return the program of one device for a program lowered for as many CPU devices.

    Raises:
        LoweringError: see `per_device.from_global_program`.
    """
    return _with_compiler_flags(per_device.from_global_program(program, target), target)


def _with_compiler_flags(program: DeviceLowering, target: Target, *, fast: bool = False) -> Lowered:
    installed_compiler = compiler.find_compiler(target)
    version = installed_compiler.version if installed_compiler else compiler_flags.NEWEST_VERSION
    options = {
        "hlo": hashlib.sha256(program.normalised.hlo).hexdigest(),
        "flags": compiler_flags.flags(target, version, fast=fast),
        "compiler": installed_compiler.version if installed_compiler else None,
    }
    return program.lowered(target, "neuron", options)


def compile(lowered: Lowered) -> Artifact:
    """Compile with neuronx-cc, or with the simulator if the target is neuron-sim.

    The artifact's record contains everything that a loader checks.

    Raises:
        CompilerMissing: neuronx-cc is not installed on this machine; the error carries a bundle
            that can be compiled on another one.
        OutOfMemory: the program does not fit the device's memory.
        LoweringError: preflight or the compiler rejected the program.
    """
    target, hlo, flags = lowered.target, lowered.handle.hlo, lowered.options["flags"]
    memory = per_device.memory(lowered.handle, lowered.facts["neuron"])
    preflight_record = preflight.check(
        hlo, lowered.handle.sources, lowered.name, target, flags, peak=memory["peak"]
    )
    record = _record(lowered, memory, preflight_record)
    installed_compiler = compiler.find_compiler(target)
    if installed_compiler is None:
        raise bundle.compiler_missing_error(hlo, flags, record, target)
    payload, seconds = compiler_choice.compile_timed(
        installed_compiler, hlo, flags, graph=lowered.name, target=target
    )
    return Artifact(
        payload,
        bundle.completed_record(record, payload, seconds, flags, installed_compiler.version),
    )


def _record(
    lowered: Lowered, memory: dict[str, int], preflight_record: dict[str, Any]
) -> dict[str, Any]:
    """Return the part of the record that is known before compilation."""
    target = lowered.target
    compile_facts = {
        "target": str(target),
        "stablehlo_bytes": len(lowered.text),
        "memory": memory,
        "neuron": lowered.facts["neuron"] | {"preflight": preflight_record},
        **collectives.read(lowered.text, lowered.plan.mesh).to_record(),
    }
    if target.runs_on_cpu:
        compile_facts["fingerprint"] = fingerprint(devices(target))
    return lowered.facts | compile_facts


def load(artifact: Artifact, target: Target) -> Executable:
    """Load a compiled program; the caller has checked the payload against its digest.

    Raises:
        LoweringError: the payload was compiled for another machine, or it is a simulated NEFF for
            a real target or the reverse, or this machine has no Neuron runtime.
    """
    record = artifact.record
    neff.check(
        artifact.payload, simulated=target.runs_on_cpu, what=f"the compiled {record['graph']} step"
    )
    cpu_devices = devices(target)
    mesh = make_mesh(MeshShape(record["mesh"]), cpu_devices)
    if not target.runs_on_cpu:
        return Executable(NeffProgram(artifact.payload, record, mesh), record, mesh)
    check_fingerprint(record, cpu_devices)
    _, executable = neff.unpack(artifact.payload)
    loaded = simulation.load_module(executable, cpu_devices)
    return Executable(simulation.SimulatedProgram(loaded, record, mesh), record, mesh)


def checkpoint_arrays(tree: Tree) -> Tree:
    """Return a tree that a checkpoint can write: arrays on Neuron cores are copied to the host."""
    return jax.tree.map(lambda leaf: leaf.to_host() if isinstance(leaf, CoreArray) else leaf, tree)
