"""What the validation loss refuses."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from graphtrain.config.schema import Batch, Data, Loss, Model, Program
from graphtrain.errors import DataError
from graphtrain.run.evaluate import (
    check_validation,
    perplexity,
    validation_batches,
    validation_loss,
)
from lowering.machine.target import Target


def test_a_validation_set_in_which_nothing_counts_is_refused():
    evaluate = SimpleNamespace(inputs=lambda name: {})
    with pytest.raises(DataError, match="no token of it counts in the loss"):
        validation_loss(evaluate, (), [], Target.parse("cpu:1"))


def weights(*rows):
    return {"weights": np.array(rows, np.float32)}


def program(**settings):
    model = Model(layers=1, embed=8, heads=2, mlp=8, vocab=16)
    batch = Batch(global_batch_size=2, seq_len=2)
    return Program(target="cpu:1", model=model, batch=batch, **settings)


def test_a_validation_set_is_checked_up_to_the_first_batch_that_counts():
    def batches():
        yield weights([0, 0], [0, 0])
        yield weights([0, 0], [0, 1])
        raise AssertionError("read too far")

    check_validation(batches(), program())


@pytest.mark.parametrize(
    ("rows", "loss"), [([[0, 0], [0, 0]], Loss()), ([[0, 1], [0, 0]], Loss(kind="dpo"))]
)
def test_one_in_which_nothing_counts_is_refused_before_training(rows, loss):
    with pytest.raises(DataError, match="no token of it counts in the loss"):
        check_validation([weights(*rows)], program(loss=loss))


def test_the_perplexity_of_a_loss_too_large_for_a_float_is_infinite():
    assert perplexity(math.log(3)) == pytest.approx(3) and perplexity(800.0) == math.inf


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_a_limit_of_batches_does_not_depend_on_microbatches(make_dataset, microbatches):
    """A run with another number of them is the same run, and its losses must compare."""
    data = Data(train="unused", validation=str(make_dataset([np.arange(1, 100) % 16], 16)))
    batch = Batch(global_batch_size=4, seq_len=4, microbatches=microbatches)
    settings = replace(program(), batch=batch)
    batches = list(validation_batches(data, settings, 16, 2))
    assert sum(len(one["tokens"]) for one in batches) == 2 * 4
