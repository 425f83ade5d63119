"""Ascend backend: the counterpart of lowering.xla.backend, which serves XLA's own targets."""

from __future__ import annotations

import functools
import hashlib
import time
from pathlib import Path
from typing import Any

import jax

from lowering.artifact import Artifact
from lowering.ascend import installation, launch
from lowering.ascend.device import RankArray, RankProgram
from lowering.ascend.ranks import Ranks
from lowering.ascend.translate import MindirGraph, translate
from lowering.errors import LoweringError, PeerLost
from lowering.graph import Graph
from lowering.hlo import collectives
from lowering.lowered import Lowered
from lowering.machine import host
from lowering.machine.target import Target
from lowering.per_device import backend as per_device
from lowering.per_device.backend import DeviceLowering
from lowering.tracing import operator_regions
from lowering.trees import Tree
from lowering.xla import backend as xla
from lowering.xla import distributed
from lowering.xla.arrays import from_shards, to_devices
from lowering.xla.backend import forbid_tracing, plan_graph
from lowering.xla.devices import Device, make_mesh
from lowering.xla.executable import Executable
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
    """Return CPU devices, which hold arrays on their way to the ranks and from them.

    If a run has several processes, each has as many devices as ranks, in the same order.
    """
    count = distributed.count()
    if count == 1:
        return per_device.devices(target)
    return xla.devices(Target("cpu", (count, target.devices // count)))


def lower(graph: Graph, rules: Rules, mesh_shape: MeshShape, target: Target) -> Lowered:
    """Lower a graph to the program of one device.

    Raises:
        ShardingError: see `per_device.lower`.
        LoweringError: see `per_device.lower`.
    """
    with operator_regions.enable_regions("attention"):
        program = per_device.lower(graph, rules, mesh_shape, target, rank_input=_takes_rank(target))
    return _translated(program, target)


def from_global_program(program: Lowered, target: Target) -> Lowered:
    """Return the program of one device for a program lowered for as many CPU devices.

    Raises:
        LoweringError: see `per_device.from_global_program`.
    """
    return _translated(
        per_device.from_global_program(program, target, rank_input=_takes_rank(target)), target
    )


def _takes_rank(target: Target) -> bool:
    """Return whether a program needs its rank: on a CPU, for the collectives made of sums."""
    return target.runs_on_cpu and target.devices > 1


def _translated(program: DeviceLowering, target: Target) -> Lowered:
    hlo = hashlib.sha256(program.normalised.hlo).hexdigest()
    return program.lowered(target, "ascend", {"hlo": hlo, "translator": _translator()})


@functools.cache
def _translator() -> str:
    """Return a digest of the code that writes graphs, which acts as this target's compiler."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def compile(lowered: Lowered) -> Artifact:
    """Translate the program to MindIR; neither MindSpore nor a device is needed.

    Raises:
        LoweringError: an operation is not supported.
    """
    target, facts = lowered.target, lowered.facts["ascend"]
    start_time = time.perf_counter()
    translated = translate(
        lowered.handle,
        name=lowered.name,
        ranks=target.devices,
        native=not target.runs_on_cpu,
        in_place=dict(facts["aliases"]),
    )
    record = lowered.facts | {
        "target": str(target),
        "stablehlo_bytes": len(lowered.text),
        "compile_seconds": round(time.perf_counter() - start_time, 3),
        "memory": per_device.memory(lowered.handle, facts),
        "ascend": facts | _loading(translated),
        **collectives.read(lowered.text, lowered.plan.mesh).to_record(),
    }
    return Artifact(translated.mindir, record)


def _loading(translated: MindirGraph) -> dict[str, Any]:
    """Return the entries of the record that a loader needs."""
    return {
        "stored": [[list(tensor.shape), tensor.dtype] for tensor in translated.inputs],
        "variables": list(translated.variables),
        "returned": list(translated.returned),
        "groups": [[list(group) for group in groups] for groups in translated.groups],
        "exchanges": [list(sources) for sources in translated.exchanges],
        "nodes": translated.nodes,
        "attention_left": list(translated.left),
    }


def load(artifact: Artifact, target: Target) -> Executable:
    """Load a graph on the ranks of this host.

    Raises:
        LoweringError: MindSpore or CANN is not installed, or the graph is for another target.
    """
    record = artifact.record
    if Target.parse(record["target"]) != target:
        raise LoweringError(
            f"the compiled {record['graph']} step is for {record['target']}, not for {target}"
        )
    mesh = make_mesh(MeshShape(record["mesh"]), devices(target))
    program = RankProgram(artifact.payload, record, mesh, _ranks(target), _device(target))
    return Executable(program, record, mesh)


def _device(target: Target) -> str:
    """Return MindSpore's name of the kind of device."""
    return "CPU" if target.runs_on_cpu else "Ascend"


@functools.cache
def _ranks(target: Target) -> Ranks:
    """Return the ranks of this process, started on first use by all processes of a run."""
    missing = (
        "" if installation.has_mindspore() else f"{target} needs MindSpore, which is not installed"
    )
    cluster = launch.agree_on_cluster(
        target.devices, missing and f"{missing}; run {installation.INSTALL_COMMAND}"
    )
    if target.runs_on_cpu:
        return Ranks(cluster, _device(target))
    try:
        return Ranks(cluster, _device(target))
    except PeerLost:
        raise
    except LoweringError as error:
        raise LoweringError(
            f"{target} needs its devices and CANN, with CANN's set_env.sh sourced, but starting "
            f"the ranks on this machine failed ({error}); the compiled graphs are complete, so run "
            "the same command on a machine that has both"
        ) from None


def checkpoint_arrays(tree: Tree) -> Tree:
    """Return a tree that a checkpoint can write: arrays on the ranks are copied to this process."""
    return jax.tree.map(lambda leaf: leaf.to_host() if isinstance(leaf, RankArray) else leaf, tree)


def memory_in_use() -> int:
    """Return this process's memory in bytes, without that of the ranks.

    MindSpore does not report the memory of the ranks.
    """
    return host.resident_bytes()


def peak_memory() -> int:
    """Return the peak of this process's memory in bytes, without that of the ranks."""
    return host.peak_resident_bytes()
