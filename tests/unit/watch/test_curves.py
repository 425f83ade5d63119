"""Curves: bounded, and the mean, lowest and highest value of every interval of steps."""

import math

import numpy as np

from graphtrain.run.watch.curves import Curves


def test_a_long_curve_has_few_points_that_are_means_of_its_values():
    values = np.random.default_rng(0).normal(size=5000)
    curves = Curves(most_points=100)
    for step, value in enumerate(values, 1):
        curves.add({"step": step, "loss": float(value)})
    points = curves.changed(0)["loss"]
    width = curves.width
    assert width == 64 and len(points) <= 100
    padded = {step // width: [] for step in range(1, 5001)}
    for step, value in enumerate(values, 1):
        padded[step // width].append(value)
    assert [point[0] // width for point in points] == list(padded)
    np.testing.assert_allclose([point[1] for point in points], list(map(np.mean, padded.values())),
                               rtol=1e-5, atol=1e-6)  # fmt: skip
    np.testing.assert_allclose([point[2] for point in points], list(map(min, padded.values())),
                               rtol=1e-6)  # fmt: skip
    np.testing.assert_allclose([point[3] for point in points], list(map(max, padded.values())),
                               rtol=1e-6)  # fmt: skip
    assert curves.highest("loss") == values.max()


def test_only_points_that_changed_are_told_again():
    curves = Curves()
    for step in (1, 2):
        curves.add({"step": step, "loss": 0.5})
    known = curves.sequence
    curves.add({"step": 2, "validation_loss": 0.25})
    assert curves.changed(known) == {"validation_loss": [[2, 0.25]]}
    assert curves.changed(curves.sequence) == {} and curves.epoch == 0


def test_values_that_cannot_be_drawn_are_counted():
    curves = Curves()
    for value in (None, math.nan, math.inf, 1e300, -1e300, 2):
        curves.add({"step": 1, "loss": value})
    assert curves.changed(0) == {"loss": [[1, 2.0]]} and curves.not_finite == {"loss": 5}


def test_hostile_records_do_not_grow_without_bound():
    curves = Curves(most_points=50)
    for number in range(2000):
        curves.add({"step": number * 2**50 % 2**62, f"name {number}": 1.0, "loss": 1.0})
    points = curves.changed(0)
    assert len(points) <= 300 and len(points["loss"]) <= 50
