"""What the validation loss refuses."""

from types import SimpleNamespace

import pytest

from graphtrain.errors import DataError
from graphtrain.evaluate import validation_loss
from lowering.target import Target


def test_a_validation_set_in_which_nothing_counts_is_refused():
    evaluate = SimpleNamespace(inputs=lambda name: {})
    with pytest.raises(DataError, match="nothing in it counts"):
        validation_loss(evaluate, (), [], Target.parse("cpu:1"))
