"""Files of a dump: dump.json, an index of its arrays, and a folder of safetensors for each step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import TypedDict  # pydantic refuses that of typing before Python 3.12

from graphtrain.errors import DumpError, WeightsError
from graphtrain.files import validate
from graphtrain.weights.files import DTYPE_CODES, WeightFiles, open_weight_files
from graphtrain.weights.writer import SafetensorsWriter
from sharding_rules.documents import DocumentError, read_object

INDEX = "dump.json"
_FORMAT = 1


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
            index = validate(DumpIndex, read_object(path))
        except DocumentError as error:
            raise DumpError(f"{path} is damaged: {error}; write the dump again") from None
        if index.format != _FORMAT:
            raise DumpError(
                f"{path} has format {index.format}, and this version reads {_FORMAT}; write the "
                "dump again"
            )
        return cls(directory, index)

    def arrays(self, step: int) -> WeightFiles:
        """Open the arrays of a step.

        Raises:
            DumpError: a file is missing or damaged.
        """
        folder = self.directory / step_folder(step)
        try:
            files = open_weight_files(folder)
        except WeightsError as error:
            raise DumpError(f"{error}; write the dump again") from None
        if missing := [one.name for one in self.index.arrays if one.name not in files.names]:
            raise DumpError(f"{folder} lacks {missing[0]}; write the dump again")
        return files


def step_folder(step: int) -> str:
    """Return the name of the folder of a step."""
    return f"step-{step:06}"


def write_step(directory: Path, step: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the arrays of one step, in their order, under their names.

    Raises:
        DumpError: an array has a dtype that the files do not support.
    """
    for name, array in arrays.items():
        if array.dtype not in DTYPE_CODES:
            raise DumpError(f"{name} has dtype {array.dtype}, which a dump cannot store")
    specs = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    writer = SafetensorsWriter(directory / step_folder(step), specs)
    for name, array in arrays.items():
        writer.write(name, array)
    writer.close()


def write_index(directory: Path, index: DumpIndex) -> None:
    """Write dump.json."""
    text = json.dumps(asdict(index), indent=1, allow_nan=False)
    (directory / INDEX).write_text(text + "\n")


def names_of(arrays: Sequence[ArrayEntry]) -> list[str]:
    """Return the names of arrays, in the order of execution."""
    return [one.name for one in arrays]
