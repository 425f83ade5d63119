"""Extracted graphs as tasks for the pool, and the keys by which the store knows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from graphtrain.cache.key import CacheKey
from graphtrain.compile.request_keys import source_digests
from graphtrain.compile.tasks import Task
from graphtrain.errors import ExtractionError
from graphtrain.torch_xla.graphs import Extracted, Extraction, Graph
from lowering.errors import LoweringError
from lowering.hlo.module import HloModule
from lowering.machine.target import Target
from lowering.machine.toolchain import Toolchain

_SOURCES = ("lowering/", "sharding_rules/")  # nothing else of ours is in an extracted program


def read_module(file: Path) -> HloModule:
    """The module of a file.

    Raises:
        ExtractionError: the file holds none.
    """
    try:
        return HloModule.read(file.read_bytes())
    except (OSError, LoweringError) as error:
        raise ExtractionError(f"{file}: {error}; extract again") from None


def tasks_of(graphs: Iterable[Extracted]) -> list[Task]:
    """The graphs for the pool; their names are what progress and the store call them."""
    return [Task(graph.name, graph, graph.name, request_key(graph)) for graph in graphs]


def of(extraction: Extraction, target: str | None) -> dict[str, Extracted]:
    """The graphs of a script by hash, for a target; by default as many devices of this CPU.

    Raises:
        ExtractionError: the target has another number of devices.
        LoweringError: no such target.
    """
    script, machine = Path(extraction.script).name, target or f"cpu:{extraction.devices}"
    if (has := Target.parse(machine).devices) != extraction.devices:
        raise ExtractionError(
            f"{script} is a program of {extraction.devices} devices, and {machine} has {has}; "
            "split its arrays among as many (torch_xla.runtime.use_spmd, CPU_NUM_DEVICES), or "
            "choose another target"
        )
    found, names = {}, set()
    for graph in extraction.graphs:
        name = f"{script} step {graph.steps[0]}"
        if name in names:  # as of a value that is read within the step
            name = f"{name} {graph.hash[:8]}"
        names.add(name)
        found[graph.hash] = Extracted(name, graph.hash, graph.file, extraction.meshes, machine)
    return found


def request_key(extracted: Extracted) -> CacheKey:
    """What an extracted graph is asked for by; tracing it again changes nothing of this.

    Raises:
        ExtractionError: the file holds no module.
        LoweringError: no such target.
    """
    target, module = Target.parse(extracted.target), read_module(extracted.file)
    sources = {
        name: digest for name, digest in source_digests().items() if name.startswith(_SOURCES)
    }
    inputs = [f"{each.spec.dtype}{list(each.spec.shape)}" for each in module.inputs]
    return CacheKey.of(
        program={"torch_xla": extracted.hash, "hlo": module.digest, "inputs": inputs},
        mesh=[dict(mesh.axes) for mesh in extracted.meshes],
        sources=sources,
        target=target.ingredients(),
        toolchain=dataclasses.asdict(Toolchain.here(target.platform)),
    )


def about(graph: Graph, extracted: Extracted) -> dict[str, Any]:
    """What a report says of a graph beside what became of it."""
    module = read_module(extracted.file)
    return {
        "hash": graph.hash,
        "steps": list(graph.steps),
        "instructions": module.instructions,
        "bytes": graph.file.stat().st_size,
        "parameters": len(module.inputs),
        "outputs": len(module.outputs),
        "donated": len(module.donated),
    }
