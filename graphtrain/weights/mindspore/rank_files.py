"""Weights of MindSpore's checkpoints by rank, assembled by their strategy files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from graphtrain.errors import WeightsError
from graphtrain.weights.mindspore.ckpt_file import CkptFile
from lowering.ascend.strategy import ReadLayout, read_strategy
from lowering.errors import LoweringError

Stages = Mapping[int, Mapping[str, ReadLayout]]
_RANK = re.compile(r"rank_(\d{1,6})", re.ASCII)
_MOST_BYTES = 64 << 20  # of a strategy file


class RankFiles:
    """Weights of all ranks, by name.

    Args:
        files: The file of each rank.
        stages: Layouts of the strategy files.

    Raises:
        WeightsError: a rank is missing, or ranks do not agree with the strategy.
    """

    def __init__(self, files: list[CkptFile], stages: Stages) -> None:
        self._places: dict[str, tuple[int, ReadLayout]] = {}  # first rank of the stage, by name
        sizes = {layout.ranks for layouts in stages.values() for layout in layouts.values()}
        if len(sizes) > 1 or set(stages) != set(range(len(stages))):
            raise WeightsError(
                f"the strategy has pipeline stages {sorted(stages)} of {sorted(sizes)} ranks; it "
                "needs all stages from 0, of equally many ranks"
            )
        (size,) = sizes
        if size * len(stages) != len(files):
            raise WeightsError(
                f"the strategy is of {size * len(stages)} ranks, but there are {len(files)} "
                "directories rank_N"
            )
        self._files = files
        for stage, layouts in stages.items():
            for name in files[stage * size].names:
                if name not in layouts:
                    raise WeightsError(f"the strategy of stage {stage} does not contain {name}")
                self._places.setdefault(name, (stage * size, layouts[name]))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def dtype(self, name: str) -> np.dtype:
        return self._files[self._places[name][0]].dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        first, layout = self._places[name]
        shape = self._files[first].shape(name)
        return tuple(size * layout.shards(axis) for axis, size in enumerate(shape))

    def read(self, name: str) -> np.ndarray:
        first, layout = self._places[name]
        shape, dtype = self._files[first].shape(name), self.dtype(name)
        result, filled = None, set()
        for rank in range(layout.ranks):
            index = tuple(layout.index(axis, rank) for axis in range(len(shape)))
            if index in filled:
                continue
            filled.add(index)
            file = self._files[first + rank]
            if name not in file.names or (file.shape(name), file.dtype(name)) != (shape, dtype):
                raise WeightsError(
                    f"rank {first + rank} has no {name} with the shape {shape} of rank {first}, "
                    f"or not in {dtype}"
                )
            place = tuple(
                slice(at * size, (at + 1) * size) for at, size in zip(index, shape, strict=True)
            )
            shard = file.read(name)  # checks the bytes of the shape before there is an array
            if result is None:
                result = np.empty(self.shape(name), dtype)
            result[place] = shard
        assert result is not None  # a layout has a rank
        return result


def open_ckpt(source: Path, strategy: Path | None) -> CkptFile | RankFiles:
    """Open one complete `.ckpt` file, or directories rank_N with their strategy.

    Args:
        source: File, or directory with rank_N/NAME.ckpt.
        strategy: Strategy file or directory of several; None: `strategy` in the source, if any.

    Raises:
        WeightsError: files are missing, damaged, or do not belong together.
    """
    if source.is_file():
        return CkptFile(source)
    if not source.is_dir():
        raise WeightsError(f"{source}: no such file or directory")
    ranks = {
        int(match[1]): path for path in source.iterdir() if (match := _RANK.fullmatch(path.name))
    }
    if not ranks or set(ranks) != set(range(len(ranks))):
        raise WeightsError(
            f"{source} has directories of ranks {sorted(ranks)[:8]}; it needs all from rank_0, or "
            "name one complete .ckpt file"
        )
    files = [CkptFile(_file(ranks[rank])) for rank in range(len(ranks))]
    own = source / "strategy"
    if strategy is None and not own.is_dir():
        if len(files) == 1:
            return files[0]
        raise WeightsError(f"{source} has {len(files)} ranks; name their strategy with --strategy")
    return RankFiles(files, _read_strategies(strategy or own))


def _file(folder: Path) -> Path:
    files = sorted(folder.glob("*.ckpt"))
    if len(files) != 1:
        raise WeightsError(
            f"{folder} contains {len(files)} .ckpt files; keep the one to convert in each rank"
        )
    return files[0]


def _read_strategies(path: Path) -> Stages:
    """Read a strategy file, or those of all ranks; ranks of one stage have the same."""
    files = sorted(path.glob("*.ckpt")) if path.is_dir() else [path]
    if not files:
        raise WeightsError(f"{path} contains no strategy files (.ckpt)")
    stages: dict[int, Mapping[str, ReadLayout]] = {}
    for file in files:
        if not file.is_file():
            raise WeightsError(f"{file} is no file")
        try:
            with file.open("rb") as opened:
                content = opened.read(_MOST_BYTES + 1)
            if len(content) > _MOST_BYTES:
                raise LoweringError(f"it has more than {_MOST_BYTES} bytes; is it a checkpoint?")
            found = read_strategy(content)
        except (OSError, LoweringError) as error:
            raise WeightsError(f"{file}: {error}") from error
        for stage, layouts in found.items():
            if stages.setdefault(stage, layouts) != layouts:
                raise WeightsError(f"{file} contradicts another file of pipeline stage {stage}")
    return stages
