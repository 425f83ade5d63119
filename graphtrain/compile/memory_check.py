"""Check that a compiled program fits the memory of its device, with one error for all targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.memory import largest
from graphtrain.cost_model.native_equivalent import sizes_unknown
from graphtrain.cost_model.padded_stages import with_padding_layers
from graphtrain.torch_xla.graphs import ExtractedGraph
from lowering.errors import OutOfMemory
from lowering.machine import gpu_memory


def check_fits(program: ResolvedProgram | ExtractedGraph, record: Mapping[str, Any]) -> None:
    """Raise if a GPU program's peak is above the memory of JAX's allocator: XLA does not check it.

    Raises:
        OutOfMemory: the peak that the compiler reports is above that memory.
    """
    target, peak = program.target, record["memory"]["peak"]
    usable = target.usable_memory_bytes
    if not target.is_gpu or peak <= usable:
        return
    message = (
        f"it needs {peak / 1e9:.1f} GB, and the allocator has {usable / 1e9:.1f} GB of a device's "
        f"{target.memory_bytes / 1e9:.1f} GB ({gpu_memory.VARIABLE})"
    )
    raise with_largest_arrays(OutOfMemory(record["graph"], target, message), program)


def with_largest_arrays(
    error: OutOfMemory, program: ResolvedProgram | ExtractedGraph
) -> OutOfMemory:
    """Return the error with the largest arrays, if an estimate of the training step has them."""
    if isinstance(program, ExtractedGraph) or error.graph != "train":
        return error
    if sizes_unknown(program.settings):
        return error
    largest_arrays = largest(with_padding_layers(program))
    array_sizes = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in largest_arrays.items())
    return OutOfMemory(error.graph, error.target, error.compiler_message, array_sizes)
