"""Plan of a torch-dist checkpoint, whose tensors are read when they are written."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from graphtrain.weights.families.family import LayerWeights, is_stacked
from graphtrain.weights.megatron.torch_dist_writer import Tensors
from graphtrain.weights.torch_arrays import as_torch

# The format has the names of Transformer Engine's layers, which contain the norm before them.
_INPUT_NORM = (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
_MLP_NORM = (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
# Layers of Transformer Engine with state besides weights, which megatron-core requires in a
# checkpoint, and which is None without FP8.
_WITH_STATE = re.compile(
    r"(.*\.(linear_qkv|linear_proj|linear_fc1|linear_fc2|[qk]_layernorm|final_layernorm)"
    r"|.*\.pre_mlp_layernorm)\.weight"
)


class LazyPlanner(SavePlanner):
    """Plan with one chunk for each group of tensors: a layer, or all experts of a layer.

    Args:
        tensors: Tensors to write.
        report: Called for each group of tensors that is written.
    """

    def __init__(self, tensors: Tensors, report: Callable[[], None]) -> None:
        self._tensors, self._report = tensors, report
        self._groups: dict[MetadataIndex, LayerWeights] = {}
        self._metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Accept the arguments of the base class; the tensors are those of the constructor."""

    def create_local_plan(self) -> SavePlan:
        """Return the chunks, and the empty states of layers."""
        items = []
        for group in self._tensors.groups:
            for key in _keys(group, self._tensors):
                items.append(self._chunk(key, group))
            items += [self._state(name) for name in _states(group, self._tensors)]
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plan of the only process."""
        return all_plans, Metadata(self._metadata)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Read the tensors of one chunk."""
        if write_item.type is WriteItemType.BYTE_IO:
            state = io.BytesIO()
            torch.save([None], state)
            state.seek(0)
            return state
        assert write_item.tensor_data is not None
        self._report()
        read = [tensor for _, tensor in self._tensors.read(self._groups[write_item.index])]
        tensor = np.stack(read) if len(read) > 1 else read[0]
        return as_torch(np.ascontiguousarray(tensor.reshape(write_item.tensor_data.chunk.sizes)))

    def _chunk(self, key: str, group: LayerWeights) -> WriteItem:
        """Return the plan of a group as a chunk of the array of all layers."""
        shape = self._tensors.shape(group)
        if is_stacked(group.row):
            shape = (len(group.names), *shape)
        offset, size = (0,) * len(shape), shape
        if group.layer is not None:
            offset, size = (group.layer, *offset), (self._tensors.model.layers, *shape)
            shape = (1, *shape)
        chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
        dtype = getattr(torch, str(self._tensors.dtype(group)))
        entry = self._metadata.setdefault(
            key, TensorStorageMetadata(TensorProperties(dtype), torch.Size(size), [])
        )
        assert isinstance(entry, TensorStorageMetadata)
        index = MetadataIndex(key, offset, len(entry.chunks))
        entry.chunks.append(chunk)
        self._groups[index] = group
        data = TensorWriteData(chunk, entry.properties, entry.size)
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def _state(self, name: str) -> WriteItem:
        self._metadata[name] = BytesStorageMetadata()
        return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)


def _keys(group: LayerWeights, tensors: Tensors) -> Iterator[str]:
    """Yield the names of a group in the checkpoint.

    The norm before a router has two: megatron-core's own layers have one, Transformer Engine's
    another.
    """
    key = group.row.name.replace("{layer}.", "").replace(".{expert}.", ".experts.")
    key = key.replace(*_INPUT_NORM)
    if tensors.model.moe is None or _MLP_NORM[0] in key:
        yield key.replace(*_MLP_NORM)
    if tensors.model.moe is not None:
        yield key


def _states(group: LayerWeights, tensors: Tensors) -> Iterator[str]:
    """Yield the names of the states of a group's layers."""
    name = group.row.name
    if not _WITH_STATE.fullmatch(name) or (
        ".pre_mlp_layernorm." in name and tensors.model.moe is None
    ):
        return
    layer = name.replace("{layer}.", "").replace(".{expert}.", ".experts.").rpartition(".")[0]
    names = [layer]
    if layer.endswith(".linear_qkv"):
        names.append(layer.replace(".linear_qkv", ".core_attention"))
    experts = range(len(group.names)) if is_stacked(group.row) else [None]
    for layer, expert in ((layer, expert) for layer in names for expert in experts):
        yield f"{layer}._extra_state/{_shard(group, expert, tensors)}"


def _shard(group: LayerWeights, expert: int | None, tensors: Tensors) -> str:
    """Return megatron-core's name of an object among those of all layers and experts."""
    offset, shape = ((), ()) if group.layer is None else ((group.layer,), (tensors.model.layers,))
    if expert is not None:
        offset, shape = (*offset, expert), (*shape, len(group.names))
    numbers = [
        ".".join(map(str, axis or default)) for axis, default in ((offset, (0,)), (shape, (1,)))
    ]
    return "shard_" + "_".join(numbers)
