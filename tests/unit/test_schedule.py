import numpy as np
import optax
import pytest

from graphtrain.config.schema import Data, LearningRate, Run
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


def rates(steps: int, **settings) -> list[float]:
    schedule = LearningRate(peak=1.0, **settings)
    return [learning_rate(schedule, steps, step) for step in range(steps)]


def test_wsd_equals_optax_one_step_on():
    reference = optax.join_schedules(
        [
            optax.linear_schedule(0.0, 1.0, 10),
            optax.constant_schedule(1.0),
            optax.linear_schedule(1.0, 0.1, 20),
        ],
        [10, 80],
    )
    found = rates(
        100, schedule="wsd", warmup_steps=10, decay_steps=20, decay_style="linear", minimum=0.1
    )
    assert found == pytest.approx(np.array([reference(step + 1) for step in range(100)]), rel=1e-5)


@pytest.mark.parametrize(
    ("style", "remaining"),
    [
        ("linear", [0.75, 0.5, 0.25, 0.0]),
        ("sqrt", [0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0.0]),  # 1 - sqrt(1/4, 2/4, 3/4, 1)
        ("cosine", [(1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0.0]),
    ],
)
def test_wsd_is_stable_until_its_decay_of_each_style(style, remaining):
    found = rates(10, schedule="wsd", decay_fraction=0.4, decay_style=style)
    assert found == pytest.approx([1.0] * 6 + remaining, abs=1e-15)


def test_wsd_decays_by_the_root_in_the_last_tenth_unless_settings_say_otherwise():
    found = rates(20, schedule="wsd")
    assert found == pytest.approx([1.0] * 18 + [1 - 0.5**0.5, 0.0])


def test_a_decay_that_begins_at_a_checkpoint_follows_what_the_longer_run_had_until_then():
    long, short = (rates(n, schedule="wsd", warmup_steps=3, decay_steps=4) for n in (100, 20))
    assert short[:16] == long[:16] and short[16:] != long[16:20]


def test_inverse_square_root_does_not_depend_on_the_number_of_steps():
    found = rates(100, schedule="inverse_sqrt", warmup_steps=4)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[15] == 0.5 and found[63] == 0.25  # sqrt(4 / 16), sqrt(4 / 64)
    assert found[:50] == rates(50, schedule="inverse_sqrt", warmup_steps=4)
    assert min(rates(100, schedule="inverse_sqrt", warmup_steps=4, minimum=0.3)[4:]) == 0.3


def test_polynomial_equals_optax_one_step_on():
    reference = optax.polynomial_schedule(1.0, 0.1, 2.5, 95, 5)
    found = rates(100, schedule="polynomial", warmup_steps=5, minimum=0.1, power=2.5)
    assert found[5:] == pytest.approx(np.array([reference(n + 1) for n in range(5, 100)]), rel=1e-5)
    assert rates(9, schedule="polynomial") == rates(9, schedule="linear")


def test_piecewise_equals_optax_one_step_on():
    reference = optax.piecewise_constant_schedule(1.0, {5: 0.5, 7: 0.2})
    found = rates(9, schedule="piecewise", boundaries=(5, 7), factors=(0.5, 0.1))
    assert found == [1.0] * 5 + [0.5] * 2 + [0.1] * 2
    assert found == pytest.approx(np.array([reference(step) for step in range(9)]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"decay_steps": 3}, 'decay_steps is only for schedule = "wsd", and schedule = "cosine"'),
        ({"schedule": "wsd", "decay_steps": 3, "decay_fraction": 0.1}, "set either decay_fraction"),
        ({"schedule": "wsd", "power": 2.0}, 'power is only for schedule = "polynomial"'),
        ({"schedule": "inverse_sqrt"}, "set warmup_steps to at least 1"),
        ({"schedule": "piecewise", "boundaries": (3,)}, "1 boundaries, 0 factors"),
        (
            {"schedule": "piecewise", "warmup_steps": 3, "boundaries": (3,), "factors": (0.1,)},
            "must rise, from after warmup_steps = 3",
        ),
        (
            {"schedule": "piecewise", "boundaries": (3,), "factors": (0.1,), "minimum": 1e-5},
            "minimum is not for piecewise",
        ),
    ],
)
def test_settings_that_a_schedule_has_not_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        LearningRate(**settings)


def test_a_warm_up_and_a_decay_that_overlap_are_refused():
    rate = LearningRate(schedule="wsd", warmup_steps=6, decay_steps=5)
    with pytest.raises(ValueError, match="the 5 steps of the decay are more than steps = 10"):
        Run(directory="run", steps=10, data=Data(train="data"), learning_rate=rate)
