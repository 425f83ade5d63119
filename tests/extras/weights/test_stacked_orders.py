"""Blocks in the rows of stacked arrays, in stages with virtual stages and in front of them."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from graphtrain.torch_frontend.blocks import Stack
from graphtrain.torch_frontend.model import OpenedModel
from graphtrain.weights.stacked_orders import block_rows
from sharding_rules.pipeline import Stages

FRONT = Stack("layers", 2, 1, (("w",),), is_whole=False)
STAGED = Stack("layers", 4, 1, (("w",),), start=2, is_whole=False)
MODULE: Any = SimpleNamespace(parameters=dict)
SETTINGS: Any = None


def test_rows_in_front_of_stages_keep_an_axis_of_size_1():
    """Two rows of shape (1, 5) have as many entries as two stages with two chunks of none."""
    opened = OpenedModel(SETTINGS, MODULE, (FRONT, STAGED), axes={})
    stages = Stages(2, 2, (1, 1, 1, 1))
    for shape, stack in (((2, 1, 5), FRONT), ((2, 2, 1, 5), STAGED)):
        array = np.arange(np.prod(shape)).reshape(shape)
        rows = block_rows(opened, stack.path(0, "w"), array, stages)
        np.testing.assert_array_equal(rows, array.reshape(stack.count, 1, 5))
