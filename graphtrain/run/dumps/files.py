"""Files of a dump: dump.json, an index of its arrays, and a folder of safetensors for each step.

dump.json has the digests of all files, and of itself, so that damage is never a difference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from typing_extensions import TypedDict  # pydantic refuses that of typing before Python 3.12

from graphtrain.errors import DumpError, WeightsError
from graphtrain.files import content_digest, counted, json_digest, read_digested_object, validate
from graphtrain.graphs.names import SUMMARY
from graphtrain.weights.files import DTYPE_CODES, WeightFiles
from graphtrain.weights.weight_folder import open_weight_files
from graphtrain.weights.writer import SafetensorsWriter
from sharding_rules.documents import DocumentError

INDEX = "dump.json"
_FORMAT = 2  # from 2 on with digests


@dataclass(frozen=True)
class ArrayEntry:
    """One array of a dump; its place in the index is that in the order of execution."""

    name: str
    shape: list[int]  # of the complete array, also where only its summary is stored
    dtype: str
    lines: list[str]  # of the model's code that made it; empty if none is known


class StepEntry(TypedDict):
    """One step of a dump."""

    step: int  # number of the step, from 1
    batch: str  # digest of its tokens, targets and loss mask
    files: dict[str, str]  # SHA-256 digests of the files in its folder, by name
    not_finite: int  # number of arrays with elements that are not finite
    loss_scale: float | None  # dynamic loss scale of the step; None if it has none
    skipped: bool  # whether its gradients were not finite, so that it left the state as it was
    shapes: NotRequired[dict[str, list[int]]]  # of complete arrays that differ from `arrays`' shape


@dataclass(frozen=True)
class DumpIndex:
    """Contents of dump.json."""

    target: str
    mesh: dict[str, int]
    dtype: str  # of the model's computation
    summary: bool  # only the statistics of `names.SUMMARY` of each array are stored
    program: str  # digest of the program's request key; empty if it is not graphtrain's
    identity: dict[str, Any]  # what the run computes: settings by name, digests of its data
    versions: dict[str, str]  # of the compiler and its libraries
    arrays: list[ArrayEntry]
    steps: list[StepEntry]
    format: int = field(default=_FORMAT)

    def stores_summary(self, name: str) -> bool:
        """Return whether only the statistics of an array are stored."""
        return self.summary and not name.startswith("metrics/")

    def shape(self, entry: ArrayEntry, step: int) -> list[int]:
        """Return the shape of a complete array in a step, which differs between phases."""
        (of_step,) = (one for one in self.steps if one["step"] == step)
        return of_step.get("shapes", {}).get(entry.name, entry.shape)

    def stored_type(self, entry: ArrayEntry, step: int) -> tuple[list[int], str]:
        """Return shape and dtype of an array in the files of a step."""
        is_summary = self.stores_summary(entry.name)
        return ([len(SUMMARY)], "float32") if is_summary else (self.shape(entry, step), entry.dtype)


@dataclass(frozen=True)
class StoredDump:
    """A dump on disk."""

    directory: Path
    index: DumpIndex

    @classmethod
    def open(cls, directory: Path) -> StoredDump:
        """Open a dump.

        Raises:
            DumpError: the directory contains none, or one of another version of graphtrain.
        """
        path = directory / INDEX
        if not path.is_file():
            raise DumpError(
                f"{directory} contains no {INDEX}; name a directory that graphtrain dump wrote"
            )
        try:
            fields = read_digested_object(path)
            if (found := fields.get("format", _FORMAT)) != _FORMAT:
                raise DumpError(
                    f"{path} has format {str(found)[:80]}, and this version reads {_FORMAT}; write "
                    "the dump again"
                )
            return cls(directory, validate(DumpIndex, fields))
        except DocumentError as error:
            raise DumpError(f"{path} is damaged: {error}; write the dump again") from None

    def arrays(self, step: int) -> WeightFiles:
        """Open the arrays of a step.

        Raises:
            DumpError: a file is missing, damaged or of another step, or dump.json describes other
                arrays than the files have.
        """
        folder = self.directory / step_folder(step)
        try:
            self._verify_files(folder, step)
            files = open_weight_files(folder)
            self._verify_arrays(folder, step, files)
        except OSError as error:
            reason = f"{error.filename or folder}: {error.strerror or error}"
            raise DumpError(f"{reason}; write the dump again") from None
        except WeightsError as error:
            raise DumpError(f"{error}; write the dump again") from None
        return files

    def _verify_files(self, folder: Path, step: int) -> None:
        digests = {one["step"]: one["files"] for one in self.index.steps}
        present = {path.name: path for path in folder.iterdir()}
        for name, digest in digests[step].items():
            if name not in present:
                raise DumpError(f"{folder} lacks {name}; write the dump again")
            if (found := content_digest(present[name])) != digest:
                others = [one for one, files in digests.items() if files.get(name) == found]
                reason = f"it is that of step {others[0]}" if others else "it is damaged"
                raise DumpError(
                    f"{present[name]} is not the file that was written there: {reason} (its "
                    f"digest differs from that in {INDEX}); write the dump again"
                )
        weights = {name for name in present if name.endswith((".safetensors", ".index.json"))}
        if unknown := sorted(weights - digests[step].keys()):
            raise DumpError(f"{folder} has {unknown[0]}, which {INDEX} does not list; remove it")

    def _verify_arrays(self, folder: Path, step: int, files: WeightFiles) -> None:
        entries = {one.name: one for one in self.index.arrays}
        if missing := [name for name in entries if name not in files.names]:
            raise DumpError(f"{folder} lacks {missing[0]}; write the dump again")
        if unknown := [name for name in files.names if name not in entries]:
            raise DumpError(
                f"{folder} has {unknown[0]}, which {INDEX} does not list; write the dump again"
            )
        for name, entry in entries.items():
            found = list(files.shape(name)), files.dtype(name).name
            if found != (described := self.index.stored_type(entry, step)):
                raise DumpError(
                    f"{folder} has {name} as {found[1]} {found[0]}, and {INDEX} as {described[1]} "
                    f"{described[0]}; write the dump again"
                )


def step_folder(step: int) -> str:
    """Return the name of the folder of a step."""
    return f"step-{step:06}"


def not_finite_reason(entry: StepEntry, arrays: int) -> str | None:
    """Return what happened in a step whose arrays are not all finite; None if all are.

    Args:
        entry: the step.
        arrays: number of its arrays.
    """
    if not entry["not_finite"]:
        return None
    have = f"{entry['not_finite']} of {counted(arrays, 'array')} have elements that are not finite"
    if entry["skipped"]:
        return f"overflowed at loss scale {entry['loss_scale']:.9g} and was skipped: {have}"
    return f"is not finite: {have}"


def write_step(
    directory: Path,
    step: int,
    arrays: Mapping[str, np.ndarray],
    *,
    batch: str = "",
    summary: bool = False,
    loss_scale: float | None = None,
    skipped: bool = False,
    shapes: Mapping[str, list[int]] | None = None,
) -> StepEntry:
    """Write the arrays of one step, in their order, under their names; return its entry.

    Args:
        directory: directory of the dump.
        step: number of the step, from 1.
        arrays: arrays by name, or their summaries.
        batch: digest of the batch.
        summary: whether they are summaries.
        loss_scale: dynamic loss scale of the step.
        skipped: whether the step left the state as it was.
        shapes: shapes of complete arrays that differ from those of the index.

    Raises:
        DumpError: an array has a dtype that the files do not support.
    """
    for name, array in arrays.items():
        if array.dtype not in DTYPE_CODES:
            raise DumpError(f"{name} has dtype {array.dtype}, which a dump cannot store")
    specs = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    folder = directory / step_folder(step)
    writer = SafetensorsWriter(folder, specs)
    for name, array in arrays.items():
        writer.write(name, array)
    writer.close()
    entry = StepEntry(
        step=step,
        batch=batch,
        files={path.name: content_digest(path) for path in sorted(folder.iterdir())},
        not_finite=sum(not _is_finite(name, array, summary) for name, array in arrays.items()),
        loss_scale=loss_scale,
        skipped=skipped,
    )
    if shapes:
        entry["shapes"] = dict(shapes)
    return entry


def _is_finite(name: str, array: np.ndarray, summary: bool) -> bool:
    if summary and not name.startswith("metrics/"):
        return bool(array[SUMMARY.index("non_finite")] == 0)
    return bool(np.isfinite(array).all())


def write_index(directory: Path, index: DumpIndex) -> None:
    """Write dump.json, with its digest."""
    content = asdict(index)
    content["digest"] = json_digest(content)
    text = json.dumps(content, indent=1, allow_nan=False)
    (directory / INDEX).write_text(text + "\n")


def names_of(arrays: Sequence[ArrayEntry]) -> list[str]:
    """Return the names of arrays, in the order of execution."""
    return [one.name for one in arrays]
