"""Weights of a run, moved to a program that stacks its layers in another order."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from graphtrain.checkpoints.layer_order import LayerOrder
from graphtrain.checkpoints.layer_rows import stacked_pairs
from graphtrain.errors import TrainingError
from graphtrain.weights import resident
from sharding_rules.pipeline import Stages

THREE_AND_ONE, ONE_AND_THREE = Stages(2, 1, (3, 1)), Stages(2, 1, (1, 3))


def test_an_order_that_no_shape_tells_is_refused(monkeypatch):
    """Stages of 3 and 1 layers have as many rows as those of 1 and 3; a copy would mix them."""

    def order_of(program: Any) -> LayerOrder:
        return LayerOrder(program.rows, lambda described, read: described, by_shape=True)

    monkeypatch.setattr(resident, "layer_order_of", order_of)
    trained: Any = SimpleNamespace(adapter=None, rows=THREE_AND_ONE.rows)
    program: Any = SimpleNamespace(rows=ONE_AND_THREE.rows)
    arrays = {"layers": {"w": np.zeros((6, 2))}, "embed": np.zeros((8, 2))}
    with pytest.raises(TrainingError, match=r"in another order: .* use the same pipeline.layers"):
        resident.relaid_parameters(arrays, trained, None, program, arrays)


def test_arrays_whose_shapes_differ_are_stacked():
    rows = THREE_AND_ONE.rows, (0, 1, 2, 3)
    shapes = {"layers/w": ((6, 2), (4, 2)), "embed": ((8, 2), (8, 2))}
    (found,) = stacked_pairs(shapes, rows).items()
    assert (found[0], found[1][0].rows, found[1][1].rows) == ("layers/w", *rows)
