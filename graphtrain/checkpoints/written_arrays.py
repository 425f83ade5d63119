"""Whole checkpoints that are written array by array, without a device and with little memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.checkpoints import private_orbax
from lowering.trees import Tree, unflatten

_CHUNK_BYTES = 64 << 20  # bytes of one chunk of an array on disk


def write_zeros(
    path: Path, arrays: Mapping[str, Sequence[Any]], metadata: Mapping[str, Any]
) -> None:
    """Write an Orbax checkpoint of zeros, which needs almost no memory or disk space.

    Args:
        path: Directory of the checkpoint.
        arrays: Shape and dtype of each array by its path.
        metadata: What `CheckpointInfo` reads.
    """
    import orbax.checkpoint as ocp

    zeros: Tree = unflatten(
        {
            name: np.broadcast_to(np.zeros((), dtype_of(dtype)), shape)
            for name, (shape, dtype) in arrays.items()
        }
    )
    save_args = unflatten({name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in arrays})
    handler = ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(
            type_handler_registry=private_orbax.host_array_handlers()
        ),
        about=ocp.JsonCheckpointHandler(),
    )
    with ocp.Checkpointer(handler) as checkpointer:
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(zeros, save_args=save_args),
            about=ocp.args.JsonSave(dict(metadata)),
        )
        checkpointer.save(path.absolute(), items)


def chunks_of(array: Any) -> Iterator[tuple[slice, ...]]:
    """Yield the parts of an opened array that are one chunk on disk."""
    shape, chunk_shape = array.shape, array.chunk_layout.write_chunk.shape or ()
    starts = [range(0, size, step) for size, step in zip(shape, chunk_shape, strict=True)]
    for origin in itertools.product(*starts):
        yield tuple(
            slice(start, min(start + step, size))
            for start, step, size in zip(origin, chunk_shape, shape, strict=True)
        )


def dtype_of(name: str) -> np.dtype:
    """Return the dtype of a name, also of bfloat16, which NumPy alone does not know."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
