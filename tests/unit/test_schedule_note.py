"""What a resumed run says when another number of steps changes its learning rate."""

import pytest

from graphtrain.config.schema import Data, LearningRate, Run
from graphtrain.run.resume import STEPS, schedule_note


def note(before: int, now: int, start: int, warmup: int = 2) -> str | None:
    rate = LearningRate(peak=1.0, minimum=0.0, warmup_steps=warmup, schedule="linear")
    run = Run(directory="run", steps=now, data=Data(train="data"), learning_rate=rate)
    return schedule_note(run, {STEPS: before}, start)


def test_more_steps_than_a_schedule_that_had_ended_are_said():
    assert "it was 0.000e+00 at step 12 and is" in str(note(12, 20, 12))


@pytest.mark.parametrize("now", [3, 12])
def test_a_schedule_that_was_all_warm_up_has_a_rate_at_its_end(now):
    assert "it was 1.000e+00 at step 2 and is" in str(note(2, now, 2))


def test_the_same_rate_is_not_worth_a_word():
    assert note(12, 12, 6) is None
    assert note(100, 120, 1, warmup=50) is None
