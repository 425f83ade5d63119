"""Parameter strategy files: how a plan shards its parameters, in MindSpore's format; in and out.

mindspore.transform_checkpoints and MindFormers read them to convert checkpoints from one sharding
to another. Ranks are numbered as in graphtrain's meshes, the last mesh axis fastest.
Source: mindspore 2.10.0, mindspore.train.node_strategy_pb2 for the field numbers, and
mindspore.parallel._parallel_serialization, which reads the files.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lowering.errors import LoweringError
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import ArrayLayout

SUFFIX = ".ckpt"  # of MindSpore's own strategy files, which are not checkpoints

_NOT_SHARDED = -1
_MOST_RANKS = 1 << 20

_MESSAGES = {
    "Strategies": {"stage": (1, "uint32")},
    "StrategyItem": {"node_name": (1, "string"), "parallel_strategys": (2, "Strategies")},
    "Matrix": {"dim": (1, "[uint32]")},
    "Map": {"dim": (1, "[int32]")},
    "Sizes": {"dim": (1, "[int64]")},
    "Layouts": {
        "dev_matrix": (1, "[Matrix]"),
        "tensor_map": (2, "[Map]"),
        "param_split_shape": (3, "[Sizes]"),
        "indices_offset": (4, "[Sizes]"),
        "field": (5, "int32"),
        "opt_weight_shard_step": (6, "int32"),
        "opt_weight_shard_size": (7, "int32"),
    },
    "LayoutItem": {"param_name": (1, "string"), "parallel_layouts": (2, "Layouts")},
    "StrategyMap": {
        "current_stage": (1, "uint32"),
        "parallel_strategy_item": (2, "[StrategyItem]"),
        "parallel_layout_item": (3, "[LayoutItem]"),
    },
}


def strategy_file(layouts: Mapping[str, ArrayLayout], mesh: MeshShape, stage: int = 0) -> bytes:
    """Return a strategy file, a ParallelStrategyMap.

    Args:
        layouts: layouts of the parameters, by their names in checkpoints.
        mesh: mesh axes and their sizes, of the ranks of one pipeline stage.
        stage: pipeline stage of the parameters.

    Raises:
        LoweringError: MindSpore would read part of a parameter's name as a pipeline stage.
    """
    # Required fields are written even if they are 0.
    strategy_map = _classes()["StrategyMap"](current_stage=0)
    # Readers treat a file without operators as empty.
    item = strategy_map.parallel_strategy_item.add(node_name="graphtrain")
    item.parallel_strategys.stage = stage
    for name, layout in layouts.items():
        if "-" in name:
            raise LoweringError(
                f"{name}: MindSpore would read the part before '-' as a pipeline stage; rename the "
                "parameter"
            )
        item = strategy_map.parallel_layout_item.add(param_name=name)
        _describe(item.parallel_layouts, layout.split, mesh)
    return strategy_map.SerializeToString(deterministic=True)


@dataclass(frozen=True)
class ReadLayout:
    """Sharding of a parameter over the ranks of one pipeline stage, from a strategy file."""

    matrix: tuple[int, ...]  # sizes of the axes of the ranks, the last fastest
    axes: tuple[tuple[int, ...], ...]  # axes that split each dimension, the first slowest

    @property
    def ranks(self) -> int:
        """Number of ranks of a stage."""
        return math.prod(self.matrix)

    def shards(self, dimension: int) -> int:
        """Return the number of shards of a dimension; those after the listed ones have one."""
        axes = self.axes[dimension] if dimension < len(self.axes) else ()
        return math.prod(self.matrix[axis] for axis in axes)

    def index(self, dimension: int, rank: int) -> int:
        """Return which shard of a dimension a rank of the stage has."""
        place, index = _place(self.matrix, rank), 0
        for axis in self.axes[dimension] if dimension < len(self.axes) else ():
            index = index * self.matrix[axis] + place[axis]
        return index


def read_strategy(content: bytes) -> dict[int, dict[str, ReadLayout]]:
    """Read a strategy file, of one pipeline stage or merged from several.

    Returns:
        Layouts of parameters by name, by pipeline stage.

    Raises:
        LoweringError: the file is damaged, or shards of a parameter differ in size.
    """
    from google.protobuf.message import DecodeError

    strategy_map = _classes()["StrategyMap"]()
    try:
        strategy_map.ParseFromString(content)
    except DecodeError as error:
        raise LoweringError(f"it is no strategy file of MindSpore: {error}") from error
    items = strategy_map.parallel_strategy_item
    own = items[0].parallel_strategys.stage if items else 0
    stages: dict[int, dict[str, ReadLayout]] = {}
    for item in strategy_map.parallel_layout_item:
        stage, _, name = item.param_name.rpartition("-")
        if stage and not (stage.isascii() and stage.isdigit() and len(stage) < 6):
            raise LoweringError(f"{item.param_name[:200]} does not begin with a pipeline stage")
        layout = _read_layout(name, item.parallel_layouts)
        stages.setdefault(int(stage) if stage else own, {})[name] = layout
    if not stages:
        raise LoweringError("it is no strategy file of MindSpore: it has no parameters")
    return stages


def _read_layout(name: str, layouts: Any) -> ReadLayout:
    matrix = tuple(layouts.dev_matrix[0].dim) if layouts.dev_matrix else ()
    maps = [tuple(one.dim) for one in layouts.tensor_map if one.dim]
    if not matrix or min(matrix) < 1 or math.prod(matrix) > _MOST_RANKS:
        raise LoweringError(f"{name[:200]} has device matrix {matrix[:8]}; the file is damaged")
    if layouts.opt_weight_shard_size not in (0, 1):
        raise LoweringError(
            f"{name[:200]} is sharded by the parallel optimizer too, which is not supported; merge "
            "the checkpoint with MindSpore first (mindspore.transform_checkpoints)"
        )
    if any(one.dim for one in layouts.param_split_shape):
        raise LoweringError(f"{name[:200]} has shards of different sizes, which is not supported")
    dimensions = maps if len(layouts.tensor_map) > 1 else [(axis,) for axis in sum(maps, ())]
    numbers = [axis for dimension in dimensions for axis in dimension if axis != _NOT_SHARDED]
    if len(set(numbers)) < len(numbers) or any(not 0 <= axis < len(matrix) for axis in numbers):
        raise LoweringError(f"{name[:200]} has tensor map {maps[:8]}; the file is damaged")
    axes = tuple(
        tuple(len(matrix) - 1 - axis for axis in dimension if axis != _NOT_SHARDED)
        for dimension in dimensions
    )
    return ReadLayout(matrix, axes)


def _place(matrix: tuple[int, ...], rank: int) -> list[int]:
    """Return the position of a rank along each axis of the device matrix."""
    place = []
    for size in reversed(matrix):
        rank, index = divmod(rank, size)
        place.append(index)
    return place[::-1]


def _describe(described: Any, split: Iterable[tuple[str, ...]], mesh: MeshShape) -> None:
    """Describe one layout: sizes of the mesh axes, and each dimension's axes, from the last."""
    axes = [name for name, size in mesh.axes.items() if size > 1]  # others shard nothing
    described.dev_matrix.add(dim=[mesh.axes[name] for name in axes] or [1])
    dimensions = [[len(axes) - 1 - axes.index(name) for name in names] for names in split]
    dimensions = [numbers or [_NOT_SHARDED] for numbers in dimensions]
    if any(len(numbers) > 1 for numbers in dimensions):
        for numbers in dimensions:
            described.tensor_map.add(dim=numbers)
        if len(dimensions) == 1:
            described.tensor_map.add()  # else readers would assign one dimension to each axis
    else:
        described.tensor_map.add(
            dim=[axis for numbers in dimensions for axis in numbers or [_NOT_SHARDED]]
        )
    described.param_split_shape.add()  # used only if shards differ in size
    described.indices_offset.add()
    described.field = described.opt_weight_shard_step = described.opt_weight_shard_size = 0


@functools.cache
def _classes() -> dict[str, Any]:
    from lowering.hlo.protobuf import classes

    return classes("graphtrain.strategy", _MESSAGES, "proto2")
