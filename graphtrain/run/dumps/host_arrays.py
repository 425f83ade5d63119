"""Arrays of a dump on the host: one layer each, of all microbatches, positions in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.graphs.names import DUMP, KINDS, SUMMARY
from lowering.trees import Tree, flatten

METRICS = ("loss", "grad_norm")  # of each step, beside its arrays


def host_arrays(
    program: ResolvedProgram, record: Mapping[str, Any], outputs: Tree
) -> dict[str, np.ndarray]:
    """Return the arrays of one step by name: whole, of all microbatches, positions in order."""
    stacks = {path: np.asarray(array) for path, array in flatten(outputs["arrays"]).items()}
    arrays = {}
    for fact in record[DUMP]["arrays"]:
        stack, row = stacks[fact["output"]], fact["row"]
        is_of_microbatches = program.batch.microbatches > 1 and not _is_parameter(fact)
        # Dimensions: microbatches, if there are several; layers, if the array stacks them.
        chosen = stack if is_of_microbatches else stack[None]
        chosen = chosen if row is None else chosen[:, row]
        if record[DUMP]["summary"]:
            arrays[fact["name"]] = merge_summaries(chosen)
        else:
            arrays[fact["name"]] = _merged(program, chosen, fact["axes"])
    metrics = {name: np.float32(outputs["metrics"][name]).reshape(()) for name in METRICS}
    return arrays | {f"metrics/{name}": np.asarray(value) for name, value in metrics.items()}


def _is_parameter(fact: Mapping[str, Any]) -> bool:
    return fact["name"].startswith(f"{KINDS[-1]}/")


def _merged(program: ResolvedProgram, array: np.ndarray, axes: list[str | None]) -> np.ndarray:
    """Return an array without its dimension of microbatches, its positions in sequence order."""
    if axes and axes[0] == "batch":
        array = array.reshape(-1, *array.shape[2:])
    elif len(array) == 1:
        array = array[0]
    ring = program.mesh.size(program.rules.activations.get("kv_seq", ()))
    for dimension, axis in enumerate(axes):
        if axis in ("seq", "residual") and ring > 1:
            array = _in_sequence_order(array, dimension, ring)
    return np.ascontiguousarray(array)


def _in_sequence_order(array: np.ndarray, dimension: int, ring: int) -> np.ndarray:
    """Undo the order of ring attention: device i of n holds chunks i and 2n - 1 - i."""
    chunks = [chunk for device in range(ring) for chunk in (device, 2 * ring - 1 - device)]
    pieces = np.split(array, 2 * ring, axis=dimension)
    return np.concatenate([pieces[chunks.index(chunk)] for chunk in range(2 * ring)], dimension)


def merge_summaries(rows: np.ndarray) -> np.ndarray:
    """Return the summary of several arrays of the same size, as one of all their elements.

    Args:
        rows: a row of statistics, `names.SUMMARY`, for each.
    """
    columns = dict(zip(SUMMARY, rows.astype(np.float64).T, strict=True))
    merged = (
        np.sqrt(np.square(columns["norm"]).sum()),
        columns["max_abs"].max(),
        columns["mean"].mean(),
        columns["zeros"].mean(),
        columns["non_finite"].sum(),
    )
    return np.array(merged, np.float32)
