"""Layers in the rows of an imported model's stacked arrays, which may be in pipeline order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from sharding_rules.pipeline import LayerRows, Stages, rows_of_periods

if TYPE_CHECKING:
    from graphtrain.torch_frontend.model import OpenedModel


def stacked_orders(
    shape: tuple[int, ...], stages: Stages | None
) -> Iterator[tuple[LayerRows, int]]:
    """Yield the orders that rows of an array of this shape may have, and the number of their axes.

    In a pipeline, an array may stack layers of stages, or layers outside of them in their order.
    The number of layers decides: an order of stages with padding has fewer than it has rows.
    """
    if stages is not None:
        leading = 2 if stages.rounds > 1 else 1
        if rows := rows_of_periods(stages.rows, math.prod(shape[:leading])):
            yield rows, leading
    if shape:
        yield tuple(range(shape[0])), 1


def layer_count(rows: LayerRows) -> int:
    """Return the number of rows that are layers."""
    return sum(layer is not None for layer in rows)


def block_rows(
    opened: OpenedModel, path: str, array: np.ndarray, stages: Stages | None
) -> np.ndarray:
    """Return one row per block, in order, of an array of a parameter or of its factor.

    Args:
        opened: The model.
        path: Path of the parameter.
        array: In the order of the stages.
        stages: Pipeline stages of the program.
    """
    if not opened.is_stacked(path):
        return array[None]
    count = len(opened.parameter_names_by_path()[path])
    if stages is not None and not _is_in_stages(opened, path):
        stages = None
    order, leading = next(
        (order, leading)
        for order, leading in stacked_orders(array.shape, stages)
        if layer_count(order) == count
    )
    rows = [order.index(block) for block in range(count)]
    return array.reshape(len(order), *array.shape[leading:])[rows]


def _is_in_stages(opened: OpenedModel, path: str) -> bool:
    """Return whether an array stacks blocks in stages, which its shape alone may not tell."""
    from graphtrain.torch_frontend.staged_blocks import StagedBlocks  # imports JAX

    return StagedBlocks.of(opened).is_in_stages(path)
