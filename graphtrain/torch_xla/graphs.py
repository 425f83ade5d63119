"""Directory of an extraction: a manifest, and the HLO of each graph in a file by its hash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphtrain.errors import ExtractionError
from lowering.machine.target import Target
from sharding_rules.axes import MESH_AXES
from sharding_rules.documents import read_json
from sharding_rules.mesh import MeshShape

# Repeated in recorder.py, which cannot import graphtrain, nor be imported without torch-xla.
FORMAT, MANIFEST, SUFFIX = 1, "graphs.json", ".hlo.pb"


@dataclass(frozen=True)
class TracedGraph:
    """One graph that a script traced."""

    hash: str  # torch-xla's hash of the graph, as in its debug output
    steps: tuple[int, ...]  # steps that run it, from 0
    file: Path  # serialised HloProto


@dataclass(frozen=True)
class Extraction:
    """All graphs of a script."""

    script: str
    versions: Mapping[str, str]  # of torch and torch_xla
    devices: int  # number of devices that its arrays are sharded over
    meshes: tuple[MeshShape, ...]  # meshes of the script, with graphtrain's names of mesh axes
    axes: tuple[Mapping[str, str], ...]  # for each mesh, graphtrain's axis name to the script's
    steps: int  # number of steps that ran
    warnings: tuple[str, ...]
    error: str  # why the script stopped early; empty if it did not
    graphs: tuple[TracedGraph, ...]  # in the order of their first use


@dataclass(frozen=True)
class ExtractedGraph:
    """One extracted graph and the target to compile it for."""

    name: str  # for example "train.py step 1": the script and the first step that runs it
    hash: str
    file: Path
    meshes: tuple[MeshShape, ...]
    target: Target


def read_extraction(directory: Path) -> Extraction:
    """Read the extraction in a directory.

    Raises:
        ExtractionError: there is none, it is of another version, or a file is missing.
    """
    file = directory / MANIFEST
    try:
        manifest = read_json(file)
    except OSError as error:
        raise ExtractionError(
            f"no extracted graphs in {directory}: {MANIFEST}: {error.strerror}"
        ) from None
    except ValueError as error:
        raise ExtractionError(f"{file} is damaged ({error}); extract again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ExtractionError(f"{file} was written by another version of graphtrain; extract again")
    try:
        return _extraction(directory, manifest)
    except (KeyError, TypeError, AttributeError) as error:
        raise ExtractionError(f"{file} is damaged ({error!r}); extract again") from None


def _extraction(directory: Path, manifest: Mapping[str, Any]) -> Extraction:
    graphs = tuple(
        TracedGraph(
            graph_record["hash"],
            tuple(graph_record["steps"]),
            directory / f"{graph_record['hash']}{SUFFIX}",
        )
        for graph_record in manifest["graphs"]
    )
    if missing := [graph.file.name for graph in graphs if not graph.file.is_file()]:
        raise ExtractionError(
            f"{', '.join(missing)} missing in {directory}; copy the directory again"
        )
    script_meshes = [_mesh(mesh_record) for mesh_record in manifest["meshes"]]
    meshes = [*script_meshes, (MeshShape({"data": manifest["devices"]}), {})]
    return Extraction(
        script=manifest["script"],
        versions=manifest["versions"],
        devices=manifest["devices"],
        meshes=tuple(mesh for mesh, _ in meshes),
        axes=tuple(axes for _, axes in meshes),
        steps=manifest["steps"],
        warnings=tuple(manifest["warnings"]),
        error=manifest["error"]["message"] if manifest["error"] else "",
        graphs=graphs,
    )


def _mesh(mesh_record: Mapping[str, Any]) -> tuple[MeshShape, Mapping[str, str]]:
    """Return a mesh of the script with graphtrain's axis names, and the script's name of each axis.

    Raises:
        ExtractionError: its devices are not in order, or it has too many axes.
    """
    sizes, devices = mesh_record["axes"], mesh_record["devices"]
    if devices != sorted(devices):
        raise ExtractionError(
            f"the script's mesh has its devices in the order {devices}; use ascending device ids, "
            "as graphtrain maps the mesh to the hardware by itself"
        )
    if len(sizes) > len(MESH_AXES):
        raise ExtractionError(
            f"the script's mesh has {len(sizes)} axes, but graphtrain supports at most 6"
        )
    names = _mesh_axis_names(list(sizes))
    shape = MeshShape(dict(zip(names, sizes.values(), strict=True)))
    return shape, dict(zip(names, sizes, strict=True))


def _mesh_axis_names(script_names: list[str]) -> list[str]:
    """Return the script's axis names if graphtrain has them in this order, else graphtrain's.

    Then the first axis is "data" and the last "tensor".
    """
    mesh_axes = list(MESH_AXES)
    if script_names == [name for name in mesh_axes if name in script_names]:
        return script_names
    return ["data", *mesh_axes[1 : len(script_names) - 1], "tensor"][: max(len(script_names), 1)]
