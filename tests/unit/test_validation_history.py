"""Lowest validation loss, and early stopping."""

import math

from graphtrain.run.validation_history import ValidationHistory


def test_the_lowest_loss_is_found_and_a_repeated_evaluation_counts_once():
    history = ValidationHistory({})
    assert history.best_step is None
    assert [history.add(10, 3.0), history.add(20, 2.5), history.add(30, 2.75)] == [
        True,
        True,
        False,
    ]
    assert history.best_step == 20
    assert not history.add(30, 2.75)
    assert not history.has_stalled(2) and history.has_stalled(1)


def test_a_loss_that_is_not_finite_is_never_the_lowest():
    assert not ValidationHistory({}).add(1, math.inf)


def test_without_patience_a_run_never_stops_early():
    history = ValidationHistory({1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0})
    assert not history.has_stalled(None)
    assert history.has_stalled(3) and not history.has_stalled(4)
