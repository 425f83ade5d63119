"""Rewrite a run's checkpoint as another program would have saved it, on the CPU, array by array.

A checkpoint contains unsharded arrays, so every mesh can load it. Programs differ only in the order
of layer rows that a pipeline requires, and in the chunks in which arrays are stored on disk.
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.checkpoints import private_orbax
from graphtrain.checkpoints.checkpoint import (
    CheckpointInfo,
    checkpoint_errors,
    read_checkpoint_info,
    saved_steps,
)
from graphtrain.checkpoints.layer_rows import Index, StackedArray, read_reordered_part
from graphtrain.checkpoints.strategy import Strategy, read_json, strategy_of
from graphtrain.config import load_config, render
from graphtrain.config.resolve import layer_rows, resolve
from graphtrain.config.schema import Config
from graphtrain.errors import PlanError, TrainingError
from graphtrain.files import create_directory
from lowering.trees import Tree, unflatten

_CHUNK_BYTES = 64 << 20  # bytes of one chunk of an array on disk
_CHUNK_CACHE_BYTES = 1 << 30  # bytes of source chunks cached while parts of them are read
_NOT_COPIED = ("checkpoints", ".lock", "config.toml")


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
) -> ReshardSummary:
    """Create a run directory for another program of the same model from one checkpoint of a run.

    Args:
        source: Directory of the run.
        destination: Directory to create; it appears only when it is complete.
        to: A configuration, or a strategy written by `graphtrain plan --save-strategy`.
        progress: Called with the number of finished arrays and of all arrays.
        step: Step of the checkpoint; the last if None.

    Raises:
        TrainingError: there is no such checkpoint, it is of another model, or writing failed.
        WeightsError: the destination exists already.
    """
    steps = saved_steps(source / "checkpoints")
    if not steps or (step is not None and step not in steps):
        there = ", ".join(map(str, steps)) or "none"
        raise TrainingError(f"no such checkpoint in {source}; existing steps: {there}")
    step = steps[-1] if step is None else step
    config = load_config(source / "config.toml")
    strategy = _strategy(to)
    about = read_checkpoint_info(source / "checkpoints", step)
    kept = _source_arrays(about, config)
    wanted = _target_arrays(strategy)
    _check_same(source / "checkpoints" / str(step), to, about, kept, strategy, wanted)
    with (
        create_directory(destination) as directory,
        checkpoint_errors(destination, "written; free disk space"),
    ):
        _copy_files(source, directory, config, strategy, destination)
        where = directory / "checkpoints" / str(step)
        _write_zeros(where, about, strategy)
        for done, (path, one) in enumerate(sorted(wanted.items())):
            progress(done, len(wanted))
            dtype = np.dtype(_dtype(strategy.arrays[path]["dtype"]))
            _copy(source / "checkpoints" / str(step), where, kept[path], one, dtype)
    progress(len(wanted), len(wanted))
    sizes = [math.prod(one.shape) * _itemsize(strategy, path) for path, one in wanted.items()]
    moved = [
        path for path, one in wanted.items() if one.leading_shape and one.rows != kept[path].rows
    ]
    return ReshardSummary(step, len(wanted), sum(sizes), len(moved))


def _strategy(to: Path) -> Strategy:
    if to.suffix == ".ckpt":
        raise PlanError(
            f"{to}: MindSpore's strategy format does not contain the optimizer state; pass a "
            "configuration, or the output of graphtrain plan CONFIG --save-strategy FILE.json"
        )
    return read_json(to) if to.suffix == ".json" else strategy_of(resolve(load_config(to).program))


def _source_arrays(about: CheckpointInfo, config: Config) -> dict[str, StackedArray]:
    rows = about.rows or layer_rows(resolve(config.program))
    return {
        path: StackedArray(path, tuple(shape), rows) for path, (shape, _) in about.arrays.items()
    }


def _target_arrays(strategy: Strategy) -> dict[str, StackedArray]:
    return {
        path: StackedArray(path, tuple(one["shape"]), strategy.rows)
        for path, one in strategy.arrays.items()
    }


def _check_same(
    where: Path,
    to: Path,
    about: CheckpointInfo,
    kept: dict[str, StackedArray],
    strategy: Strategy,
    wanted: dict[str, StackedArray],
) -> None:
    there = {
        path: (about.arrays[path][1], one.shape_without_pipeline) for path, one in kept.items()
    }
    here = {
        path: (strategy.arrays[path]["dtype"], one.shape_without_pipeline)
        for path, one in wanted.items()
    }
    for path in sorted(there | here):
        if there.get(path) != here.get(path):
            raise TrainingError(
                f"{where} has another model or optimizer than {to}: {path} is "
                f"{_say(there.get(path))} in the checkpoint and {_say(here.get(path))} in {to}"
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
    (directory / "config.toml").write_text(text)


def _write_zeros(where: Path, about: CheckpointInfo, strategy: Strategy) -> None:
    """Write an Orbax checkpoint of zeros, which needs almost no memory or disk space."""
    import orbax.checkpoint as ocp

    zeros: Tree = unflatten(
        {
            path: np.broadcast_to(np.zeros((), _dtype(one["dtype"])), one["shape"])
            for path, one in strategy.arrays.items()
        }
    )
    pieces = unflatten(
        {path: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for path in strategy.arrays}
    )
    said = {
        "loader": about.data_position,
        "arrays": {path: [one["shape"], one["dtype"]] for path, one in strategy.arrays.items()},
        "rows": strategy.rows,
    }
    handler = ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(
            type_handler_registry=private_orbax.host_array_handlers()
        ),
        about=ocp.JsonCheckpointHandler(),
    )
    with ocp.Checkpointer(handler) as opened:
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(zeros, save_args=pieces), about=ocp.args.JsonSave(said)
        )
        opened.save(where.absolute(), items)


def _copy(
    source: Path, where: Path, kept: StackedArray, wanted: StackedArray, dtype: np.dtype
) -> None:
    """Copy one array, one chunk of the destination at a time."""
    old, new = (
        private_orbax.open_array(source, kept.path, cache_bytes=_CHUNK_CACHE_BYTES),
        private_orbax.open_array(where, wanted.path, write=True),
    )

    def read(index: Index) -> np.ndarray:
        return np.asarray(old[index].read().result())

    for index in _chunks(wanted.shape, new.chunk_layout.write_chunk.shape or ()):
        new[index].write(read_reordered_part(wanted, kept, index, read, dtype)).result()


def _chunks(shape: tuple[int, ...], piece: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    steps = [range(0, size, step) for size, step in zip(shape, piece, strict=True)]
    for begin in itertools.product(*steps):
        yield tuple(
            slice(at, min(at + step, size))
            for at, step, size in zip(begin, piece, shape, strict=True)
        )


def _itemsize(strategy: Strategy, path: str) -> int:
    return _dtype(strategy.arrays[path]["dtype"]).itemsize


def _dtype(name: str) -> Any:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
