"""Writer of torch-dist checkpoints: megatron-core's use of PyTorch's distributed checkpoints."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from graphtrain.config.schema import Model
from graphtrain.weights.families.family import LayerWeights
from graphtrain.weights.megatron.pickles import import_torch


class Tensors(Protocol):
    """Tensors in Megatron's form, by groups."""

    model: Model
    groups: list[LayerWeights]

    def dtype(self, group: LayerWeights) -> np.dtype:
        """Return the dtype of the tensors of a group."""
        ...

    def shape(self, group: LayerWeights) -> tuple[int, ...]:
        """Return the shape of each tensor of a group."""
        ...

    def read(self, group: LayerWeights) -> Iterator[tuple[str, np.ndarray]]:
        """Yield names and tensors of a group: one, or one for each expert."""
        ...


def write_torch_dist(
    directory: Path, tensors: Tensors, common: dict[str, Any], report: Callable[[], None]
) -> None:
    """Write a torch-dist checkpoint, with one group of tensors in memory.

    Args:
        directory: Folder of the checkpoint, which exists.
        tensors: Tensors to write.
        common: Entries of common.pt.
        report: Called for each group of tensors that is written.
    """
    torch = import_torch(f"{directory}: writing a checkpoint of Megatron-LM")
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    from graphtrain.weights.megatron.save_planner import LazyPlanner

    planner = LazyPlanner(tensors, report)
    # Without copies ahead, which need a stream of the accelerator, also of one that is no GPU.
    writer = FileSystemWriter(
        directory, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save({}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from error  # for example that the disk is full
    torch.save(common, directory / "common.pt")
    backends = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (directory / "metadata.json").write_text(json.dumps(backends))
