"""Writer of Megatron's checkpoints with one folder per rank, `mp_rank_XX[_YYY][_ZZZ]`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from graphtrain.config.schema import Model
from graphtrain.models.flops import is_gated
from graphtrain.weights.families.family import LayerWeights
from graphtrain.weights.megatron.classic import shard_axis
from graphtrain.weights.megatron.layout import ModelChunk, RankLayout
from graphtrain.weights.megatron.names import expert_of, offset_name
from graphtrain.weights.megatron.pickles import import_torch
from graphtrain.weights.torch_arrays import as_torch

# Layers of megatron-core: its own, or those of Transformer Engine, which contain the norms before.
Naming = Literal["local", "transformer_engine"]
Rank = tuple[int, int, int]  # tensor, pipeline and expert rank
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_NORM_OF = (
    (r"\.input_layernorm\.", ".self_attention.linear_qkv.layer_norm_"),
    (r"\.pre_mlp_layernorm\.", ".mlp.linear_fc1.layer_norm_"),
)


class Tensors(Protocol):
    """Tensors in Megatron's form, by groups."""

    model: Model
    groups: list[LayerWeights]

    def read(self, group: LayerWeights) -> Iterator[tuple[str, np.ndarray]]:
        """Yield names and tensors of a group: one, or one for each expert."""
        ...


def write_rank_folders(
    directory: Path,
    tensors: Tensors,
    common: dict[str, Any],
    layout: RankLayout,
    naming: Naming,
    report: Callable[[], None],
) -> None:
    """Write the folder of every rank; the ranks of one pipeline rank are in memory together.

    Args:
        directory: Folder of the checkpoint, which exists.
        tensors: Tensors to write.
        common: Entries of every file besides the weights.
        layout: Ranks.
        naming: Layers of megatron-core whose names the weights have.
        report: Called for each group of tensors that is written.
    """
    torch = import_torch(f"{directory}: writing a checkpoint of Megatron-LM")
    chunks = layout.chunks(tensors.model)
    for pipeline in range(layout.pipeline):
        states: dict[Rank, dict[str, dict[str, Any]]] = defaultdict(dict)
        for chunk in (chunk for chunk in chunks if chunk.pipeline_rank == pipeline):
            for rank in _ranks(layout, pipeline):
                states[rank][chunk.key] = {}
            for group in (group for group in tensors.groups if _has(chunk, group, tensors.model)):
                report()
                for name, tensor in tensors.read(group):
                    _add(states, chunk, name, tensor, tensors.model, layout, naming)
        for rank, state in states.items():
            folder = directory / layout.folder(*rank)
            folder.mkdir()
            torch.save(common | state, folder / "model_optim_rng.pt")


def _ranks(layout: RankLayout, pipeline: int) -> Iterator[Rank]:
    for tensor, expert in np.ndindex(layout.tensor, layout.expert):
        yield tensor, pipeline, expert


def _has(chunk: ModelChunk, group: LayerWeights, model: Model) -> bool:
    """Return whether a chunk has the tensors of a group."""
    if group.layer is not None:
        return chunk.has_layer(group.layer)
    if group.row.name == _EMBEDDING and model.tie_word_embeddings and chunk.is_last:
        return True  # the LM head is a copy
    return chunk.is_first if group.row.name.startswith("embedding.") else chunk.is_last


def _add(
    states: dict[Rank, dict[str, dict[str, Any]]],
    chunk: ModelChunk,
    name: str,
    tensor: np.ndarray,
    model: Model,
    layout: RankLayout,
    naming: Naming,
) -> None:
    """Add the shards of a tensor to the states of the ranks that have them."""
    if name == _EMBEDDING and not chunk.is_first:
        name = _HEAD
    expert, per_rank = expert_of(name), (model.moe.experts if model.moe else 1) // layout.expert
    owners = range(layout.expert) if expert is None else [expert // per_rank]
    offset = 0 if expert is None else -(expert // per_rank) * per_rank
    key = _key(offset_name(name, -chunk.first_layer, offset), naming, model)
    blocks = 2 if is_gated(model) and "linear_fc1." in name else 1
    for rank in range(layout.tensor):
        shard = as_torch(_shard(name, tensor, rank, layout.tensor, blocks))
        for owner in owners:
            states[rank, chunk.pipeline_rank, owner][chunk.key][key] = shard


def _shard(name: str, tensor: np.ndarray, rank: int, ranks: int, blocks: int) -> np.ndarray:
    """Return the shard of a tensor rank, in memory of its own; of gate and up, its part of each."""
    axis = shard_axis(name)
    if axis is None:
        return np.ascontiguousarray(tensor)
    blocks = blocks if axis == 0 else 1
    parts = np.split(tensor, blocks * ranks, axis)[rank::ranks]
    return np.concatenate(parts, axis)


def _key(name: str, naming: Naming, model: Model) -> str:
    """Return the name that megatron-core's module has, for a canonical name."""
    name = name.replace(".mlp.experts.", ".mlp.experts.local_experts.")
    if naming == "transformer_engine":
        # The MLP's norm is part of its first layer, except where a router comes first.
        for pattern, replacement in _NORM_OF[: 2 if model.moe is None else 1]:
            name = re.sub(pattern, replacement, name)
    return name
