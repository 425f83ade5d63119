"""Checkpoints of Megatron-LM and NeMo 1 with one folder per rank; assembles shards.

Folders of Megatron-LM are `mp_rank_XX[_YYY][_ZZZ]`: the first number is the tensor rank; the
pipeline rank and the expert rank follow, each only if there are several. Those of NeMo are
`mp_rank_XX`, or with a pipeline `tp_rank_XX_pp_rank_YYY`; one rank has no folder.

Source: Megatron-LM, megatron/training/checkpointing.py, get_checkpoint_name, and NeMo,
nemo/utils/model_utils.py, inject_model_parallel_rank; the axes are those of Megatron-LM's
ColumnParallelLinear, RowParallelLinear and VocabParallelEmbedding
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.errors import WeightsError
from graphtrain.weights.files import numpy_dtype_of
from graphtrain.weights.megatron.names import (
    canonical_name,
    expert_of,
    flatten_names,
    layer_of,
    offset_name,
)
from graphtrain.weights.megatron.pickles import load_torch
from graphtrain.weights.torch_arrays import as_numpy

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_NEMO_RANK = re.compile(r"tp_rank_(\d{2,})_pp_rank_(\d{3,})")
_FILES = ("model_optim_rng.pt", "model_rng.pt", "model_weights.ckpt")
# Keys of a file that are dictionaries of weights: chunks of a pipeline; or that of Lightning.
_CHUNK = re.compile(r"model\d*|state_dict")
_SHARDED_ON_AXIS_0 = re.compile(
    r".*(word_embeddings|output_layer|linear_qkv|linear_fc1|linear_fc1_up)\.(weight|bias)"
)
_SHARDED_ON_AXIS_1 = re.compile(r".*(linear_proj|linear_fc2)\.weight")


@dataclass(frozen=True)
class _Rank:
    tensor: int
    pipeline: int
    expert: int
    path: Path


@dataclass(frozen=True)
class _Array:
    keys: tuple[str, str]  # key of the model chunk in the file, key of the array in the chunk
    paths: tuple[Path, ...]  # one file per tensor rank
    shape: tuple[int, ...]  # of one tensor rank's shard
    dtype: str


class RankFoldersCheckpoint:
    """Weights of a checkpoint with one folder per rank, by canonical names.

    Args:
        directory: Directory of the folders.
        file_name: Name of the file in each; None: the one that there is.

    Raises:
        WeightsError: a rank is missing, or a file is damaged.
    """

    def __init__(self, directory: Path, file_name: str | None = None) -> None:
        ranks = _ranks(directory, file_name)
        first = load_torch(ranks[0].path)
        if not isinstance(first, Mapping):
            raise WeightsError(f"{ranks[0].path} contains no dictionary of weights")
        self.arguments: dict[str, Any] = vars(first["args"]) if "args" in first else {}
        if ranks[0].path.suffix != ".ckpt":  # NeMo's have the newer order, and no version
            _check_version(ranks[0].path, first)
        self.gated = False  # whether linear_fc1 contains gate and up; set before the first read
        self._arrays = _index(_files_by_rank(directory, ranks, self.arguments))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._arrays)

    def dtype(self, name: str) -> np.dtype:
        return numpy_dtype_of(name, self._arrays[name].dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        array = self._arrays[name]
        shape, axis = list(array.shape), shard_axis(name)
        if axis is not None:
            shape[axis] *= len(array.paths)
        return tuple(shape)

    def read(self, name: str) -> np.ndarray:
        array, axis, dtype = self._arrays[name], shard_axis(name), self.dtype(name)
        if axis is None or len(array.paths) == 1:
            return self._part(name, array.paths[0]).copy()
        result = np.empty(self.shape(name), dtype)
        # The shard of each rank contains its part of gate, then its part of up.
        blocks = 2 if self.gated and "linear_fc1." in name else 1
        size = array.shape[axis] // blocks
        for rank, path in enumerate(array.paths):
            shard = self._part(name, path)
            for block in range(blocks):
                begin = (block * len(array.paths) + rank) * size
                shard_block = shard[block * size : (block + 1) * size] if axis == 0 else shard
                destination = slice(begin, begin + size)
                result[destination if axis == 0 else (slice(None), destination)] = shard_block
        return result

    def _part(self, name: str, path: Path) -> np.ndarray:
        array = self._arrays[name]
        chunk, key = array.keys
        # The file is mapped again for each array: mapped pages stay in memory until it is closed.
        tensor = dict(_trees(load_torch(path))).get(chunk, {}).get(key)
        if tensor is None or tuple(tensor.shape) != array.shape:
            raise WeightsError(
                f"{path} has no {key} with the first rank's shape {array.shape}; the file is "
                "damaged or of another checkpoint"
            )
        return as_numpy(tensor, self.dtype(name))


def shard_axis(name: str) -> int | None:
    """Return the axis along which tensor ranks shard an array; None if it is replicated."""
    if _SHARDED_ON_AXIS_0.fullmatch(name):
        return 0
    return 1 if _SHARDED_ON_AXIS_1.fullmatch(name) else None


def _ranks(directory: Path, file_name: str | None) -> list[_Rank]:
    """Return the ranks of the folders; the second number is the pipeline rank."""
    ranks = []
    for folder in sorted(directory.iterdir()):
        match = _RANK.fullmatch(folder.name) or _NEMO_RANK.fullmatch(folder.name)
        if match and folder.is_dir():
            tensor, pipeline, *expert = (int(group or 0) for group in match.groups())
            path = _file(folder, file_name)
            ranks.append(_Rank(tensor, pipeline, expert[0] if expert else 0, path))
    if ranks:
        return ranks
    return [_Rank(0, 0, 0, _file(directory, file_name))]  # NeMo on one rank


def _file(folder: Path, file_name: str | None) -> Path:
    """Return the file of a rank: of the name, of a known one, or the only .ckpt."""
    known = _FILES if file_name is None else (file_name,)
    if found := [folder / name for name in known if (folder / name).is_file()]:
        return found[0]
    others = sorted(path.name for path in folder.glob("*.ckpt")) if file_name is None else []
    if len(others) == 1:
        return folder / others[0]
    if others:
        raise WeightsError(
            f"{folder} contains several checkpoints; name one without the folder of the rank, "
            f"for example {folder.parent / others[-1]}"
        )
    raise WeightsError(f"{folder} contains none of {', '.join(known)}")


def _check_version(path: Path, loaded: Mapping[str, Any]) -> None:
    version = loaded.get("checkpoint_version", 0)
    if version < 2:
        raise WeightsError(
            f"{path} has checkpoint_version = {version}, in which queries, keys and values have "
            "another order; load it and save it again with Megatron-LM 2.0 or newer first"
        )


def _files_by_rank(
    directory: Path, ranks: list[_Rank], arguments: Mapping[str, Any]
) -> dict[tuple[int, int], tuple[Path, ...]]:
    """Return the files of the tensor ranks, by pipeline rank and expert rank.

    Raises:
        WeightsError: a rank is missing.
    """
    # Without a pipeline the second number is the expert rank.
    expert_parallel = (arguments.get("expert_model_parallel_size") or 1) > 1
    if expert_parallel and (arguments.get("pipeline_model_parallel_size") or 1) == 1:
        ranks = [_Rank(rank.tensor, 0, rank.pipeline, rank.path) for rank in ranks]
    files = {(rank.pipeline, rank.expert, rank.tensor): rank.path for rank in ranks}
    num_pipeline_ranks, num_expert_ranks, num_tensor_ranks = (
        max(key[axis] for key in files) + 1 for axis in range(3)
    )
    for pipeline, expert, tensor in np.ndindex(
        num_pipeline_ranks, num_expert_ranks, num_tensor_ranks
    ):
        if (pipeline, expert, tensor) not in files:
            raise WeightsError(
                f"{directory} has no folder for tensor rank {tensor}, pipeline rank {pipeline}, "
                f"expert rank {expert}, although it has folders of higher ranks"
            )
    return {
        (pipeline, expert): tuple(
            files[pipeline, expert, tensor] for tensor in range(num_tensor_ranks)
        )
        for pipeline, expert in np.ndindex(num_pipeline_ranks, num_expert_ranks)
    }


def _index(grid: Mapping[tuple[int, int], tuple[Path, ...]]) -> dict[str, _Array]:
    """Index all arrays; layers are numbered chunk by chunk, each chunk through all stages."""
    chunks: dict[tuple[str, int, int], dict[str, tuple[str, Any]]] = {}
    for (pipeline, expert), paths in grid.items():
        for chunk, tensors in _chunks(paths[0]):
            chunks[chunk, pipeline, expert] = tensors
    arrays: dict[str, _Array] = {}
    layers: dict[int, int] = defaultdict(int)  # number of layers before the chunk, by expert rank
    for chunk, pipeline, expert in sorted(
        chunks, key=lambda chunk_key: (len(chunk_key[0]), chunk_key)
    ):
        tensors = chunks[chunk, pipeline, expert]
        expert_ids = {expert_of(name) for name in tensors} - {None}
        for name, (key, tensor) in tensors.items():
            global_name = offset_name(name, layers[expert], expert * len(expert_ids))
            dtype_name = str(tensor.dtype).removeprefix("torch.")
            array = _Array((chunk, key), grid[pipeline, expert], tuple(tensor.shape), dtype_name)
            # Arrays outside the experts are replicated over expert ranks.
            arrays.setdefault(global_name, array)
        layer_ids = [layer for name in tensors if (layer := layer_of(name)) is not None]
        layers[expert] += max(layer_ids, default=-1) + 1
    return arrays


def _chunks(path: Path) -> Iterator[tuple[str, dict[str, tuple[str, Any]]]]:
    """Yield a file's model chunks (`model`, or `model0`, `model1` ...), by canonical names."""
    for chunk, tensors in _trees(load_torch(path)):
        named = [(canonical_name(key), key, tensor) for key, tensor in tensors.items()]
        yield chunk, {name: (key, tensor) for name, key, tensor in named if name}


def _trees(loaded: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tensors of each chunk of a file; NeMo's model_weights.ckpt is itself a chunk."""
    chunks = {
        key: {name: value for name, value in flatten_names(tree) if _is_tensor(value)}
        for key, tree in loaded.items()
        if _CHUNK.fullmatch(key) and isinstance(tree, Mapping)
    }
    chunks = {key: tensors for key, tensors in chunks.items() if tensors}
    if not chunks:
        chunks = {"": {name: value for name, value in loaded.items() if _is_tensor(value)}}
    yield from chunks.items()


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")
