"""Rewrite a run's checkpoint as another program would have saved it, on the CPU, array by array.

A checkpoint contains unsharded arrays, so every mesh can load it. Programs differ only in the order
of layer rows that a pipeline requires, and in the chunks in which arrays are stored on disk.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from graphtrain.checkpoints import private_orbax
from graphtrain.checkpoints.checkpoint import check_directory
from graphtrain.checkpoints.info import CheckpointInfo, check_same_model, read_checkpoint_info
from graphtrain.checkpoints.layer_rows import Index, StackedArray, read_reordered_part
from graphtrain.checkpoints.manifest import verify_files, write_manifest
from graphtrain.checkpoints.output_directory import create_directory
from graphtrain.checkpoints.steps import saved_steps
from graphtrain.checkpoints.storage_errors import checkpoint_errors
from graphtrain.checkpoints.strategy import Strategy, read_json, strategy_of
from graphtrain.checkpoints.written_arrays import chunks_of, dtype_of, write_zeros
from graphtrain.config import load_config, render
from graphtrain.config.resolve import layer_rows, resolve
from graphtrain.config.run_record import CONFIG, RECORD, write_run_config
from graphtrain.config.schema import Config
from graphtrain.errors import PlanError, TrainingError
from graphtrain.models.optimizer_state import EMA

_CHUNK_CACHE_BYTES = 1 << 30  # bytes of source chunks cached while parts of them are read
_NOT_COPIED = ("checkpoints", "quarantine", ".lease", ".lock", CONFIG, RECORD)


@dataclass(frozen=True)
class ReshardSummary:
    """Summary of a resharded checkpoint."""

    step: int
    arrays: int  # number of arrays
    bytes: int  # total size of the arrays
    reordered: int  # number of arrays whose layers were reordered


def reshard(
    source: Path,
    destination: Path,
    to: Path,
    progress: Callable[[int, int], None],
    step: int | None = None,
    *,
    averaged: bool = False,
) -> ReshardSummary:
    """Create a run directory for another program of the same model from one checkpoint of a run.

    Args:
        source: Directory of the run.
        destination: Directory to create; it appears only when it is complete.
        to: A configuration, or a strategy written by `graphtrain plan --save-strategy`.
        progress: Called with the number of finished arrays and of all arrays.
        step: Step of the checkpoint; the last if None.
        averaged: Whether the new run's weights are the moving average of the old one's.

    Raises:
        TrainingError: there is no such checkpoint, it is damaged or of another model, it has no
            averaged weights, or writing failed.
        WeightsError: the destination exists already.
    """
    check_directory(destination)
    steps = saved_steps(source / "checkpoints")
    if not steps or (step is not None and step not in steps):
        existing_steps = ", ".join(map(str, steps)) or "none"
        raise TrainingError(f"no such checkpoint in {source}; existing steps: {existing_steps}")
    step = steps[-1] if step is None else step
    config = load_config(source / CONFIG)
    strategy = _strategy(to)
    verify_files(source / "checkpoints" / str(step))
    info = read_checkpoint_info(source / "checkpoints", step)
    check_same_model(source / "checkpoints" / str(step), info, strategy.settings)
    source_arrays = _source_arrays(info, config)
    of_weights = _averages(source, source_arrays) if averaged else {}
    target_arrays = _target_arrays(strategy)
    _check_same(
        source / "checkpoints" / str(step), to, info, source_arrays, strategy, target_arrays
    )
    with (
        create_directory(destination) as directory,
        checkpoint_errors(destination, "written; free disk space"),
    ):
        _copy_files(source, directory, config, strategy, destination)
        target_path = directory / "checkpoints" / str(step)
        if averaged:  # the optimizer state is that of other weights
            info = replace(info, identity=info.identity | {"weights": "averaged"})
        _write_zeros(target_path, info, strategy)
        for finished, (path, array) in enumerate(sorted(target_arrays.items())):
            progress(finished, len(target_arrays))
            dtype = np.dtype(dtype_of(strategy.arrays[path]["dtype"]))
            origin = of_weights.get(path, source_arrays[path])
            _copy(source / "checkpoints" / str(step), target_path, origin, array, dtype)
        write_manifest(target_path)
    progress(len(target_arrays), len(target_arrays))
    sizes = [
        math.prod(array.shape) * _itemsize(strategy, path) for path, array in target_arrays.items()
    ]
    reordered = [
        path
        for path, array in target_arrays.items()
        if array.leading_shape and array.rows != source_arrays[path].rows
    ]
    return ReshardSummary(step, len(target_arrays), sum(sizes), len(reordered))


def _strategy(to: Path) -> Strategy:
    if to.suffix == ".ckpt":
        raise PlanError(
            f"{to}: MindSpore's strategy format does not contain the optimizer state; pass a "
            "configuration, or the output of graphtrain plan CONFIG --save-strategy FILE.json"
        )
    return read_json(to) if to.suffix == ".json" else strategy_of(resolve(load_config(to).program))


def _source_arrays(info: CheckpointInfo, config: Config) -> dict[str, StackedArray]:
    rows = info.rows or layer_rows(resolve(config.program))
    return {
        path: StackedArray(path, tuple(shape), rows) for path, (shape, _) in info.arrays.items()
    }


def _averages(source: Path, arrays: dict[str, StackedArray]) -> dict[str, StackedArray]:
    """Return the moving average of each weight, by the path of the weight."""
    averages = {
        path: arrays.get(path.replace("parameters", f"optimizer/{EMA}", 1))
        for path in arrays
        if path.startswith("parameters/")
    }
    found = {path: array for path, array in averages.items() if array is not None}
    if not found:
        raise TrainingError(
            f"{source} has no averaged weights; they are part of runs with "
            "program.optimizer.ema_decay"
        )
    return found


def _target_arrays(strategy: Strategy) -> dict[str, StackedArray]:
    return {
        path: StackedArray(path, tuple(array["shape"]), strategy.rows)
        for path, array in strategy.arrays.items()
    }


def _check_same(
    source_path: Path,
    to: Path,
    info: CheckpointInfo,
    source_arrays: dict[str, StackedArray],
    strategy: Strategy,
    target_arrays: dict[str, StackedArray],
) -> None:
    source_specs = {
        path: (info.arrays[path][1], array.shape_without_pipeline)
        for path, array in source_arrays.items()
    }
    target_specs = {
        path: (strategy.arrays[path]["dtype"], array.shape_without_pipeline)
        for path, array in target_arrays.items()
    }
    for path in sorted(source_specs | target_specs):
        if source_specs.get(path) != target_specs.get(path):
            raise TrainingError(
                f"{source_path} has another model or optimizer than {to}: {path} is "
                f"{_say(source_specs.get(path))} in the checkpoint and "
                f"{_say(target_specs.get(path))} in {to}"
            )


def _say(array: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if array is None else f"{array[0]} {list(array[1])}"


def _copy_files(
    source: Path, directory: Path, config: Config, strategy: Strategy, destination: Path
) -> None:
    """Copy all files of a run except its checkpoints; write config.toml with the new program."""
    for path in source.iterdir():
        if path.name in _NOT_COPIED:
            continue
        if path.is_dir():
            shutil.copytree(path, directory / path.name)
        else:
            shutil.copyfile(path, directory / path.name)
    run = replace(config.run, directory=str(destination))
    text = render(replace(config, program=strategy.settings, run=run))
    write_run_config(directory, text, start=0)


def _write_zeros(target_path: Path, info: CheckpointInfo, strategy: Strategy) -> None:
    arrays = {path: [array["shape"], array["dtype"]] for path, array in strategy.arrays.items()}
    metadata = {
        "step": int(target_path.name),
        "loader": info.data_position,
        "arrays": arrays,
        "rows": strategy.rows,
        "identity": info.identity,
        "changes": info.changes,
        "journal": info.journal,
    }
    write_zeros(target_path, arrays, metadata)


def _copy(
    source: Path,
    target_path: Path,
    source_array: StackedArray,
    target_array: StackedArray,
    dtype: np.dtype,
) -> None:
    """Copy one array, one chunk of the destination at a time."""
    source_store, target_store = (
        private_orbax.open_array(source, source_array.path, cache_bytes=_CHUNK_CACHE_BYTES),
        private_orbax.open_array(target_path, target_array.path, write=True),
    )

    def read(index: Index) -> np.ndarray:
        return np.asarray(source_store[index].read().result())

    for index in chunks_of(target_store):
        target_store[index].write(
            read_reordered_part(target_array, source_array, index, read, dtype)
        ).result()


def _itemsize(strategy: Strategy, path: str) -> int:
    return dtype_of(strategy.arrays[path]["dtype"]).itemsize
