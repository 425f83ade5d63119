"""Parameter strategy files: how a plan shards its parameters, in MindSpore's format.

mindspore.transform_checkpoints and MindFormers read them to convert checkpoints from one sharding
to another. Ranks are numbered as in graphtrain's meshes, the last mesh axis fastest.
Source: mindspore 2.10.0, mindspore.train.node_strategy_pb2 for the field numbers, and
mindspore.parallel._parallel_serialization, which reads the files.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from lowering.errors import LoweringError
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import ArrayLayout

SUFFIX = ".ckpt"  # of MindSpore's own strategy files, which are not checkpoints

_NOT_SHARDED = -1

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


def strategy_file(layouts: Mapping[str, ArrayLayout], mesh: MeshShape) -> bytes:
    """Return a strategy file, a ParallelStrategyMap.

    Args:
        layouts: layouts of the parameters, by their names in checkpoints.
        mesh: mesh axes and their sizes.

    Raises:
        LoweringError: MindSpore would read part of a parameter's name as a pipeline stage.
    """
    # Required fields are written even if they are 0.
    strategy_map = _classes()["StrategyMap"](current_stage=0)
    # Readers treat a file without operators as empty.
    item = strategy_map.parallel_strategy_item.add(node_name="graphtrain")
    item.parallel_strategys.stage = 0
    for name, layout in layouts.items():
        if "-" in name:
            raise LoweringError(
                f"{name}: MindSpore would read the part before '-' as a pipeline stage; rename the "
                "parameter"
            )
        item = strategy_map.parallel_layout_item.add(param_name=name)
        _describe(item.parallel_layouts, layout.split, mesh)
    return strategy_map.SerializeToString(deterministic=True)


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
