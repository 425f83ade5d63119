"""Where the decoder's arrays can be read from: a converted folder, or a checkpoint of a run."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from pydantic import TypeAdapter

from graphtrain.config.resolve import rows_of_layers
from graphtrain.config.schema import Model
from graphtrain.errors import WeightsError
from graphtrain.models.lora.trainable import trained_arrays
from graphtrain.models.shapes import parameter_arrays
from graphtrain.weights.files import SafetensorsFolder, open_folder

SIDE = "hugging_face"  # the folder of files that are not weights


class Source(Protocol):
    """The decoder's arrays, of one layer each where they are in the layers."""

    @property
    def directory(self) -> Path: ...

    @property
    def files(self) -> list[Path]:
        """All that the arrays are read from."""
        ...

    @property
    def model(self) -> Model: ...

    @property
    def side(self) -> Path:
        """Files of Hugging Face that are not weights; may not be there."""
        ...

    def dtype(self, path: str) -> np.dtype | None:
        """As kept; none where numbers are kept in the dtype of training."""
        ...

    def read(self, paths: Sequence[str], layer: int | None) -> list[np.ndarray]: ...

    def part(self, path: str, layer: int | None, index: tuple[slice, ...]) -> np.ndarray: ...


def stored_name(path: str, layer: int | None) -> str:
    """Of an array in a converted folder: layers/3/mlp/up for layers/mlp/up of layer 3."""
    return path if layer is None else path.replace("layers/", f"layers/{layer}/", 1)


class Converted:
    """A folder that `graphtrain convert hf-to-graphtrain` wrote.

    Raises:
        WeightsError: it is not whole.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.side = directory, directory / SIDE
        self.model = read_model(directory / "model.toml")
        folder = open_folder(directory / "weights")
        assert isinstance(folder, SafetensorsFolder)
        self.folder = folder
        for path, spec in parameter_arrays(self.model).items():
            inside = path.startswith("layers/")
            for layer in range(self.model.layers) if inside else (None,):
                self._check(stored_name(path, layer), spec.shape[1:] if inside else spec.shape)

    @property
    def files(self) -> list[Path]:
        weights = sorted((self.directory / "weights").glob("*.safetensors"))
        return [self.directory / "model.toml", *weights]

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.folder.names or self.folder.shape(name) != shape:
            raise WeightsError(
                f"{self.directory}/weights does not hold {name} of shape {shape}, which "
                "model.toml says; convert the source again"
            )

    def dtype(self, path: str) -> np.dtype:
        layer = 0 if path.startswith("layers/") else None
        return self.folder.dtype(stored_name(path, layer))

    def read(self, paths: Sequence[str], layer: int | None) -> list[np.ndarray]:
        return [self.folder.read(stored_name(path, layer)) for path in paths]

    def part(self, path: str, layer: int | None, index: tuple[slice, ...]) -> np.ndarray:
        return self.folder.part(stored_name(path, layer), index)


class RunCheckpoint:
    """A checkpoint of a run, its last if no step is named; it holds the arrays read last.

    Raises:
        WeightsError: there is none.
    """

    def __init__(self, directory: Path, step: int | None = None) -> None:
        from graphtrain.checkpoints.checkpoint import read_about
        from graphtrain.config import load_config

        self.directory, self.side = directory, directory / SIDE
        self._checkpoints = directory / "checkpoints"
        self.step = checkpoint_step(directory, step)
        self.program = program = load_config(directory / "config.toml").program
        self.model = program.model
        rows = read_about(self._checkpoints, self.step).rows or rows_of_layers(program)
        self._row_of = {layer: row for row, layer in enumerate(rows) if layer is not None}
        self._held: dict[str, np.ndarray] = {}

    @property
    def files(self) -> list[Path]:
        step = self._checkpoints / str(self.step)
        return sorted(path for path in step.rglob("*") if path.is_file())

    def dtype(self, path: str) -> None:
        return None

    def read(self, paths: Sequence[str], layer: int | None) -> list[np.ndarray]:
        if list(self._held) != list(paths):
            self._held = {}
            self._held = {path: self._load(path) for path in paths}
        whole = list(self._held.values())
        return whole if layer is None else [array[self._row_of[layer]] for array in whole]

    def part(self, path: str, layer: int | None, index: tuple[slice, ...]) -> np.ndarray:
        return self.read([path], layer)[0][index]

    def _load(self, path: str) -> np.ndarray:
        from graphtrain.checkpoints.checkpoint import restore_array

        array = restore_array(self._checkpoints, self.step, f"parameters/{path}")
        if not path.startswith("layers/"):
            return array
        inner = trained_arrays(self.program)[path].shape[1:]
        if array.shape[-len(inner) :] != inner:
            raise WeightsError(
                f"{self._checkpoints}/{self.step}: {path} is {list(array.shape)}, which is not of "
                f"the [program] in {self.directory}/config.toml; bring its settings back"
            )
        return array.reshape(-1, *inner)  # the rounds of a pipeline are in front of its rows


def checkpoint_step(directory: Path, step: int | None) -> int:
    """The step of a run's checkpoint, its last if none is named.

    Raises:
        WeightsError: there is none.
    """
    from graphtrain.checkpoints.checkpoint import saved_steps

    steps = saved_steps(directory / "checkpoints")
    if not steps or (step is not None and step not in steps):
        there = ", ".join(map(str, steps)) or "none"
        raise WeightsError(f"no such checkpoint in {directory}; there are: {there}")
    return steps[-1] if step is None else step


def open_source(directory: Path, step: int | None = None) -> Source:
    """A converted folder or the directory of a run.

    Raises:
        WeightsError: it is neither, or has no such step.
    """
    if (directory / "model.toml").is_file():
        if step is not None:
            raise WeightsError(f"{directory} is a converted folder, which has no steps")
        return Converted(directory)
    if (directory / "checkpoints").is_dir():
        run = RunCheckpoint(directory, step)
        if run.program.adapter is None:
            return run
        from graphtrain.weights.merged import Merged

        return Merged(run)
    raise WeightsError(
        f"{directory} is neither a folder of graphtrain convert (it would hold model.toml) nor the "
        "directory of a run (checkpoints); convert weights of others first: graphtrain convert -h"
    )


def read_model(path: Path) -> Model:
    """The settings in a model.toml.

    Raises:
        WeightsError: it has none.
    """
    try:
        table = tomllib.loads(path.read_text())["program"]["model"]
        return TypeAdapter(Model).validate_json(json.dumps(table))
    except (OSError, ValueError, KeyError) as error:
        raise WeightsError(f"{path} holds no [program.model]: {error}") from error
