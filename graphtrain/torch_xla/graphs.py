"""What an extraction leaves in a directory: a manifest, and the HLO of each graph by its hash."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphtrain.errors import ExtractionError
from sharding_rules.axes import MESH_AXES
from sharding_rules.mesh import MeshShape

# As in recorder.py, which imports nothing of ours, and cannot be imported where torch-xla is not.
FORMAT, MANIFEST, SUFFIX = 1, "graphs.json", ".hlo.pb"


@dataclass(frozen=True)
class Graph:
    """One graph that a script traced."""

    hash: str  # as torch-xla has it, in its messages too
    steps: tuple[int, ...]  # that need it, from 0
    file: Path  # an HloProto


@dataclass(frozen=True)
class Extraction:
    """All graphs of a script."""

    script: str
    versions: Mapping[str, str]  # of torch and torch_xla
    devices: int  # among which its arrays are split
    meshes: tuple[MeshShape, ...]  # that the script made, by our names of axes
    axes: tuple[Mapping[str, str], ...]  # of each, our name of an axis to the script's
    steps: int  # that it took
    warnings: tuple[str, ...]
    problem: str  # why it did not go on; empty if it did
    graphs: tuple[Graph, ...]  # in the order in which it first needed each


@dataclass(frozen=True)
class Extracted:
    """One graph and the machine to compile it for: what a Program is to graphs of our own."""

    name: str  # as in "train.py step 1": the script, and the first step that needs it
    hash: str
    file: Path
    meshes: tuple[MeshShape, ...]
    target: str


def read(directory: Path) -> Extraction:
    """What was extracted into a directory.

    Raises:
        ExtractionError: nothing was, or by another version, or a file is missing.
    """
    file = directory / MANIFEST
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExtractionError(
            f"no graphs of a torch-xla script in {directory}: {MANIFEST}: {error.strerror}"
        ) from None
    except ValueError as error:
        raise ExtractionError(f"{file} is damaged ({error}); extract again") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ExtractionError(f"{file} is of another version of graphtrain; extract again")
    try:
        return _extraction(directory, found)
    except (KeyError, TypeError, AttributeError) as error:
        raise ExtractionError(f"{file} is damaged ({error!r}); extract again") from None


def _extraction(directory: Path, found: Mapping[str, Any]) -> Extraction:
    graphs = tuple(
        Graph(each["hash"], tuple(each["steps"]), directory / f"{each['hash']}{SUFFIX}")
        for each in found["graphs"]
    )
    if missing := [graph.file.name for graph in graphs if not graph.file.is_file()]:
        raise ExtractionError(f"{directory} lacks {', '.join(missing)}; copy it again")
    made = [_mesh(each) for each in found["meshes"]]
    meshes = [*made, (MeshShape({"data": found["devices"]}), {})]
    return Extraction(
        script=found["script"],
        versions=found["versions"],
        devices=found["devices"],
        meshes=tuple(mesh for mesh, _ in meshes),
        axes=tuple(axes for _, axes in meshes),
        steps=found["steps"],
        warnings=tuple(found["warnings"]),
        problem=found["error"]["message"] if found["error"] else "",
        graphs=graphs,
    )


def _mesh(about: Mapping[str, Any]) -> tuple[MeshShape, Mapping[str, str]]:
    """A mesh of the script in our vocabulary, in which the order of axes is fixed."""
    sizes, devices = about["axes"], about["devices"]
    if devices != sorted(devices):
        raise ExtractionError(
            f"the script's mesh has its devices in the order {devices}; number them in order, "
            "graphtrain places neighbours by itself"
        )
    if len(sizes) > len(MESH_AXES):
        raise ExtractionError(f"the script's mesh has {len(sizes)} axes, graphtrain's 6 at most")
    names = _our_names(list(sizes))
    shape = MeshShape(dict(zip(names, sizes.values(), strict=True)))
    return shape, dict(zip(names, sizes, strict=True))


def _our_names(theirs: list[str]) -> list[str]:
    """Their names if they are ours and in our order; else data, and tensor last."""
    ours = list(MESH_AXES)
    if theirs == [name for name in ours if name in theirs]:
        return theirs
    return ["data", *ours[1 : len(theirs) - 1], "tensor"][: max(len(theirs), 1)]
