"""Compilation tasks and cache keys of extracted graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from graphtrain.cache.key import CacheKey
from graphtrain.compile.request_keys import source_digests
from graphtrain.compile.tasks import Task
from graphtrain.errors import ExtractionError
from graphtrain.torch_xla.graphs import ExtractedGraph, Extraction, TracedGraph
from lowering.errors import LoweringError
from lowering.hlo.module import HloModule
from lowering.machine.target import Target
from lowering.machine.toolchain import Toolchain

_SOURCES = ("lowering/", "sharding_rules/")  # graphtrain sources that affect extracted programs


def read_module(file: Path) -> HloModule:
    """Read the HLO module of a file.

    Raises:
        ExtractionError: the file cannot be read, or is not an HLO module.
    """
    try:
        return HloModule.read(file.read_bytes())
    except (OSError, LoweringError) as error:
        raise ExtractionError(f"{file}: {error}; extract again") from None


def compilation_tasks(graphs: Iterable[ExtractedGraph]) -> list[Task]:
    """Return the compilation tasks of graphs; progress and the cache show their names."""
    return [Task(graph.name, graph, graph.name, request_key(graph)) for graph in graphs]


def extracted_graphs(extraction: Extraction, target: str | None) -> dict[str, ExtractedGraph]:
    """Return the graphs of a script by hash, to compile for a target.

    Args:
        extraction: of the script.
        target: name of the machine; None: this CPU with the script's number of devices.

    Raises:
        ExtractionError: the target has another number of devices than the script.
        LoweringError: the target is unknown.
    """
    script = Path(extraction.script).name
    machine = Target.parse(target or f"cpu:{extraction.devices}")
    if machine.devices != extraction.devices:
        raise ExtractionError(
            f"{script} was extracted for {extraction.devices} devices, but {target} has "
            f"{machine.devices}; "
            "extract it again with as many devices (torch_xla.runtime.use_spmd, CPU_NUM_DEVICES), "
            "or choose another target"
        )
    graph_by_hash, names = {}, set()
    for graph in extraction.graphs:
        name = f"{script} step {graph.steps[0]}"
        if name in names:  # for example a graph that computes a value read in the step
            name = f"{name} {graph.hash[:8]}"
        names.add(name)
        graph_by_hash[graph.hash] = ExtractedGraph(
            name, graph.hash, graph.file, extraction.meshes, machine
        )
    return graph_by_hash


def request_key(extracted: ExtractedGraph) -> CacheKey:
    """Return the request key of an extracted graph, which identifies it without lowering it.

    Raises:
        ExtractionError: the file is not an HLO module.
    """
    target, module = extracted.target, read_module(extracted.file)
    sources = {
        name: digest for name, digest in source_digests().items() if name.startswith(_SOURCES)
    }
    inputs = [f"{each.spec.dtype}{list(each.spec.shape)}" for each in module.inputs]
    return CacheKey.of(
        program={"torch_xla": extracted.hash, "hlo": module.digest, "inputs": inputs},
        mesh=[dict(mesh.axes) for mesh in extracted.meshes],
        sources=sources,
        target=target.key_parts(),
        toolchain=dataclasses.asdict(Toolchain.current(target.platform)),
    )


def graph_facts(graph: TracedGraph, extracted: ExtractedGraph) -> dict[str, Any]:
    """Return the facts about a graph that a report shows in addition to its outcome."""
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
