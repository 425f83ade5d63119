"""The backend of Ascend: what lowering.xla.backend is to XLA's own targets."""

from __future__ import annotations

import functools
import hashlib
import time
from pathlib import Path
from typing import Any

import jax

from lowering.artifact import Artifact
from lowering.ascend import here, launch
from lowering.ascend.device import DeviceArray, Program
from lowering.ascend.ranks import Ranks
from lowering.ascend.translate import Translated, translate
from lowering.errors import LoweringError
from lowering.graph import Graph
from lowering.hlo import collectives
from lowering.lowered import Lowered
from lowering.machine import distributed, host
from lowering.machine.target import Target
from lowering.per_device import backend as per_device
from lowering.per_device.backend import OneDevice
from lowering.tracing import operator_regions
from lowering.trees import Tree
from lowering.xla import backend as xla
from lowering.xla.backend import (
    Device,
    Executable,
    forbid_tracing,
    from_shards,
    make_mesh,
    plan_graph,
    to_devices,
)
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
    """Devices of the CPU, for which a graph is traced and split."""
    return per_device.devices(target)


def devices(target: Target) -> list[Device]:
    """Devices of the CPU, which hold what is on its way to the ranks, and from them.

    Of several processes each has as many as it has ranks, in the same order.
    """
    count = distributed.count()
    if count == 1:
        return per_device.devices(target)
    return xla.devices(Target("cpu", (count, target.devices // count)))


def lower(graph: Graph, rules: Rules, mesh_shape: MeshShape, target: Target) -> Lowered:
    """The program of one device; raises as per_device.lower."""
    with operator_regions.enable_regions("attention"):
        program = per_device.lower(graph, rules, mesh_shape, target, rank_input=_takes_rank(target))
    return _translated(program, target)


def from_global_program(whole: Lowered, target: Target) -> Lowered:
    """The same of a program that is lowered for devices of a CPU, one for each of the target's."""
    return _translated(
        per_device.from_global_program(whole, target, rank_input=_takes_rank(target)), target
    )


def _takes_rank(target: Target) -> bool:
    """On a CPU every collective is made of sums, in which each rank has its place."""
    return target.runs_on_cpu and target.devices > 1


def _translated(program: OneDevice, target: Target) -> Lowered:
    hlo = hashlib.sha256(program.normalised.hlo).hexdigest()
    return program.lowered(target, "ascend", {"hlo": hlo, "translator": _translator()})


@functools.cache
def _translator() -> str:
    """A digest of the code that writes graphs: it is this target's compiler."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def compile(lowered: Lowered) -> Artifact:
    """Write the graph as MindIR, which takes no MindSpore and no device.

    Raises:
        LoweringError: an operation that MindSpore has nothing for.
    """
    target, facts = lowered.target, lowered.facts["ascend"]
    began = time.perf_counter()
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
        "compile_seconds": round(time.perf_counter() - began, 3),
        "memory": per_device.memory(lowered.handle, facts),
        "ascend": facts | _loading(translated),
        **collectives.read(lowered.text, lowered.plan.mesh).to_record(),
    }
    return Artifact(translated.mindir, record)


def _loading(translated: Translated) -> dict[str, Any]:
    """What a loader has to know."""
    return {
        "stored": [[list(each.shape), each.dtype] for each in translated.inputs],
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
        LoweringError: MindSpore or CANN is not here, or the graph is for another machine.
    """
    about = artifact.record
    if Target.parse(about["target"]) != target:
        raise LoweringError(f"the compiled {about['graph']} step is for {about['target']}")
    mesh = make_mesh(MeshShape(about["mesh"]), devices(target))
    program = Program(artifact.payload, about, mesh, _ranks(target), _device(target))
    return Executable(program, about, mesh)


def _device(target: Target) -> str:
    """MindSpore's name of what a rank computes on."""
    return "CPU" if target.runs_on_cpu else "Ascend"


@functools.cache
def _ranks(target: Target) -> Ranks:
    """The ranks of this process, started when first asked for; all processes of a run ask."""
    missing = "" if here.has_mindspore() else f"{target} runs on MindSpore, which is not installed"
    cluster = launch.agree(target.devices, missing and f"{missing}: {here.INSTALL}")
    if target.runs_on_cpu:
        return Ranks(cluster, _device(target))
    try:
        return Ranks(cluster, _device(target))
    except LoweringError as error:
        raise LoweringError(
            f"{target} needs its devices and CANN on this machine, with CANN's set_env.sh sourced; "
            f"the compiled graphs are complete, and the same command runs them there ({error})"
        ) from None


def checkpoint_arrays(tree: Tree) -> Tree:
    """What a checkpoint can write: arrays of the ranks as copies in this process."""
    return jax.tree.map(
        lambda leaf: leaf.to_host() if isinstance(leaf, DeviceArray) else leaf, tree
    )


def memory_in_use() -> int:
    """Bytes that this process holds; the ranks hold theirs, which MindSpore does not tell."""
    return host.resident_bytes()


def peak_memory() -> int:
    """Most bytes that this process held at once; as memory_in_use."""
    return host.peak_resident_bytes()
