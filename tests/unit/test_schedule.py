import numpy as np
import optax
import pytest

from graphtrain.config.schema import LearningRate
from graphtrain.run.learning_rate import learning_rate


def test_cosine_equals_optax_one_step_on():
    schedule = LearningRate(peak=1e-3, minimum=1e-4, warmup_steps=10)
    reference = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100, 1e-4)
    for step in range(100):
        got = learning_rate(schedule, 100, step)
        np.testing.assert_allclose(got, reference(step + 1), rtol=1e-5)


def test_linear_falls_evenly_to_the_floor():
    schedule = LearningRate(schedule="linear", peak=1.0, minimum=0.5)
    assert [learning_rate(schedule, 5, step) for step in range(5)] == pytest.approx(
        [0.9, 0.8, 0.7, 0.6, 0.5]
    )


def test_constant_stays_at_the_peak_after_the_warm_up():
    schedule = LearningRate(schedule="constant", peak=1.0, warmup_steps=2)
    assert [learning_rate(schedule, 4, step) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]


def test_a_run_of_warm_up_alone_ends_at_the_peak():
    assert learning_rate(LearningRate(peak=1.0, warmup_steps=3), 3, 2) == 1.0
