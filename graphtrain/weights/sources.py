"""Sources of the decoder's arrays: a converted folder, or a checkpoint of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from pydantic import TypeAdapter, ValidationError

from graphtrain.config.hf_config import HF_FILES as HF_FILES
from graphtrain.config.presets import program_model_table
from graphtrain.config.resolve import layer_rows, resolve
from graphtrain.config.schema import Model
from graphtrain.errors import WeightsError
from graphtrain.files import first_problem
from graphtrain.models.lora.trainable import trained_arrays
from graphtrain.models.optimizer_state import EMA
from graphtrain.models.shapes import parameter_arrays
from graphtrain.weights.digests import verify_weights
from graphtrain.weights.files import SafetensorsFiles
from graphtrain.weights.weight_folder import open_weight_files
from sharding_rules.documents import read_toml


class WeightSource(Protocol):
    """Readable arrays of the decoder; arrays in the layers are read one layer at a time."""

    @property
    def directory(self) -> Path:
        """Converted folder or run directory."""
        ...

    @property
    def files(self) -> list[Path]:
        """All files that the arrays are read from."""
        ...

    @property
    def model(self) -> Model:
        """Settings of the model."""
        ...

    @property
    def side(self) -> Path:
        """Folder of Hugging Face files other than weights; it may not exist."""
        ...

    def dtype(self, path: str) -> np.dtype | None:
        """Return the stored dtype; None for a run, which stores the dtype of training."""
        ...

    def read(self, paths: Sequence[str], layer: int | None) -> list[np.ndarray]:
        """Return complete arrays of one layer, or outside the layers if `layer` is None."""
        ...

    def part(self, path: str, layer: int | None, index: tuple[slice, ...]) -> np.ndarray:
        """Return a part of the array that `read` would return."""
        ...


def stored_name(path: str, layer: int | None) -> str:
    """Return an array's name in a converted folder, for example layers/3/mlp/up."""
    return path if layer is None else path.replace("layers/", f"layers/{layer}/", 1)


class ConvertedFolder:
    """Folder written by `graphtrain convert hf-to-graphtrain`; all files are verified first.

    Raises:
        WeightsError: the folder is incomplete or damaged.
    """

    def __init__(self, directory: Path) -> None:
        verify_weights(directory)
        self.directory, self.side = directory, directory / HF_FILES
        self.model = read_model(directory / "model.toml")
        folder = open_weight_files(directory / "weights")
        assert isinstance(folder, SafetensorsFiles)
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
                f"{self.directory}/weights does not contain {name} with shape {shape}, which "
                "model.toml requires; convert the source again"
            )

    def dtype(self, path: str) -> np.dtype:
        layer = 0 if path.startswith("layers/") else None
        return self.folder.dtype(stored_name(path, layer))

    def read(self, paths: Sequence[str], layer: int | None) -> list[np.ndarray]:
        return [self.folder.read(stored_name(path, layer)) for path in paths]

    def part(self, path: str, layer: int | None, index: tuple[slice, ...]) -> np.ndarray:
        return self.folder.part(stored_name(path, layer), index)


class RunCheckpoint:
    """Checkpoint of a run; caches the arrays that were read last.

    Args:
        directory: Directory of the run.
        step: Step of the checkpoint; None for the last.
        averaged: Whether to read the moving average of the weights as the weights.

    Raises:
        DamagedCheckpoint: a file of it is not as it was written.
        WeightsError: there is no such checkpoint, or it has no moving average.
    """

    def __init__(self, directory: Path, step: int | None = None, *, averaged: bool = False) -> None:
        from graphtrain.checkpoints.info import check_same_model, read_checkpoint_info
        from graphtrain.checkpoints.manifest import verify_files
        from graphtrain.config import load_config

        self.directory, self.side = directory, directory / HF_FILES
        self._checkpoints = directory / "checkpoints"
        self.step = checkpoint_step(directory, step)
        verify_files(self._checkpoints / str(self.step))
        self.program = program = load_config(directory / "config.toml").program
        self.model = program.model
        checkpoint_info = read_checkpoint_info(self._checkpoints, self.step)
        check_same_model(self._checkpoints / str(self.step), checkpoint_info, program)
        if averaged and program.optimizer.ema_decay is None:
            raise WeightsError(
                f"{directory} has no averaged weights; they are part of runs with "
                "program.optimizer.ema_decay"
            )
        self._part = f"optimizer/{EMA}" if averaged else "parameters"
        rows = checkpoint_info.rows or layer_rows(resolve(program))
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
        arrays = list(self._held.values())
        return arrays if layer is None else [array[self._row_of[layer]] for array in arrays]

    def part(self, path: str, layer: int | None, index: tuple[slice, ...]) -> np.ndarray:
        return self.read([path], layer)[0][index]

    def _load(self, path: str) -> np.ndarray:
        from graphtrain.checkpoints.arrays import restore_array

        array = restore_array(self._checkpoints, self.step, f"{self._part}/{path}")
        if not path.startswith("layers/"):
            return array
        inner = trained_arrays(self.program)[path].shape[1:]
        if array.shape[-len(inner) :] != inner:
            raise WeightsError(
                f"{self._checkpoints}/{self.step}: {path} has shape {list(array.shape)}, which "
                f"does not match [program] in {self.directory}/config.toml; restore its settings"
            )
        return array.reshape(-1, *inner)  # merge a pipeline's axis of virtual stages


def checkpoint_step(directory: Path, step: int | None) -> int:
    """Return `step` after checking that its checkpoint exists; the last step if None.

    Raises:
        WeightsError: there is no such checkpoint.
    """
    from graphtrain.checkpoints.steps import saved_steps

    steps = saved_steps(directory / "checkpoints")
    if not steps or (step is not None and step not in steps):
        existing_steps = ", ".join(map(str, steps)) or "none"
        raise WeightsError(f"no such checkpoint in {directory}; existing steps: {existing_steps}")
    return steps[-1] if step is None else step


def read_model(path: Path) -> Model:
    """Read the model settings from a model.toml.

    Raises:
        WeightsError: the file has no valid [program.model].
    """
    try:
        table = program_model_table(read_toml(path))
        return TypeAdapter(Model).validate_json(json.dumps(table, default=str))
    except (OSError, ValueError) as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else error
        raise WeightsError(f"{path} has no valid [program.model]: {reason}") from error
