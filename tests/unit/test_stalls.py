"""Judgement of the watchdog, with times given by the test."""

import pytest

from graphtrain.config.schema import Watchdog
from graphtrain.run.stalls import (
    COMPUTING,
    DATA,
    EVALUATING,
    LOADING,
    SAVING,
    Peer,
    Progress,
    Stopwatch,
    blame,
    max_silence,
)

SETTINGS = Watchdog(step_timeout=60.0, phase_timeout=1800.0)


def after_steps(
    seconds: float, count: int, settings: Watchdog = SETTINGS
) -> tuple[Stopwatch, float]:
    """A stopwatch in the computation of a step, after `count` steps of some seconds each."""
    stopwatch, now = Stopwatch(settings), 0.0
    stopwatch.move(Progress.at(LOADING), now)
    for step in range(1, count + 2):
        stopwatch.move(Progress.at(DATA, step), now)
        stopwatch.move(Progress.at(COMPUTING, step), now + seconds / 2)
        now += seconds
    return stopwatch, now - seconds


def test_loading_and_the_first_steps_have_the_long_limit():
    stopwatch = Stopwatch(SETTINGS)
    stopwatch.move(Progress.at(LOADING), 0.0)
    assert stopwatch.limit() == 1800
    for finished in (0, 1):
        assert after_steps(10.0, finished)[0].limit() == 1800
    assert after_steps(10.0, 2)[0].limit() == 60


def test_a_first_batch_that_the_others_have_has_the_limit_of_a_step():
    stopwatch = Stopwatch(SETTINGS)
    stopwatch.move(Progress.at(DATA, 1), 0.0)
    assert stopwatch.limit(others_wait=False) == 1800
    assert stopwatch.limit(others_wait=True) == 60
    stopwatch.move(Progress.at(COMPUTING, 1), 0.0)
    assert stopwatch.limit(others_wait=True) == 1800


def test_a_step_is_stalled_after_five_times_the_median():
    assert after_steps(1.0, 10)[0].limit() == 60
    assert after_steps(30.0, 10)[0].limit() == 150


def test_waiting_for_data_and_computing_are_one_step():
    stopwatch, started = after_steps(8.0, 4)
    assert stopwatch.seconds(started + 61) == 61 > stopwatch.limit()
    assert str(stopwatch.progress) == "step 5: computing"


def test_a_batch_of_an_evaluation_and_a_save_have_limits_of_their_own():
    stopwatch, now = after_steps(1.0, 5)
    for batch in range(4):
        assert stopwatch.limit() == (60 if batch == 0 else 1800 if batch < 3 else 60)
        stopwatch.move(Progress.at(EVALUATING, 6, batch), now + batch)
    assert stopwatch.limit() == 60
    stopwatch.move(Progress.at(SAVING, 6), now + 10)
    assert stopwatch.limit() == 1800


def test_seconds_in_which_the_process_was_stopped_do_not_count():
    stopwatch, started = after_steps(1.0, 5)
    stopwatch.extend(500.0)
    assert stopwatch.seconds(started + 503) == pytest.approx(3.0)


def test_silence_is_at_most_a_minute():
    assert max_silence(SETTINGS) == 60
    assert max_silence(Watchdog(step_timeout=600.0)) == 60
    assert max_silence(Watchdog(step_timeout=5.0)) == 5


def peers(*progress: Progress | None, silent: dict[int, float] | None = None) -> dict[int, Peer]:
    return {rank: Peer(each, (silent or {}).get(rank, 0.0)) for rank, each in enumerate(progress)}


def test_the_rank_that_waits_for_data_is_named_by_those_that_compute():
    behind, ahead = Progress.at(DATA, 6), Progress.at(COMPUTING, 7)
    assert blame(peers(ahead, behind, ahead), 6.0, "in an all-reduce") == (
        "rank 1 is behind, stalled in step 6: waiting for the data loader; the others wait in "
        "step 7: computing, in an all-reduce"
    )
    assert blame(peers(behind, behind, ahead), 6.0).startswith("ranks 0, 1 are behind, stalled in")


def test_the_first_collective_is_named_for_a_rank_that_has_not_begun_the_step():
    ahead = Progress.at(COMPUTING, 7)
    ranks = peers(ahead, Progress.at(DATA, 6))
    assert blame(ranks, 6.0, "in an all-reduce", "all-gather over fsdp").endswith(
        "the others wait in step 7: computing, probably in the first collective of step 6 between "
        "processes (all-gather over fsdp)"
    )
    ranks = peers(ahead, Progress.at(COMPUTING, 6))  # it may be in any of the collectives
    assert blame(ranks, 6.0, "in an all-reduce", "all-gather").endswith(", in an all-reduce")


def test_a_silent_rank_is_named_before_one_that_is_behind():
    computing = Progress.at(COMPUTING, 7)
    ranks = peers(computing, Progress.at(DATA, 6), computing, silent={2: 61.0})
    assert blame(ranks, 60.0) == (
        "rank 2 no longer responds: no heartbeat for 61 s, last in step 7: computing (killed, "
        "stopped, or its host is lost)"
    )


def test_ranks_at_the_same_place_are_not_told_apart():
    computing = Progress.at(COMPUTING, 7)
    assert blame(peers(computing, computing), 6.0) == "all ranks are stalled in step 7: computing"
    assert blame(peers(computing), 6.0) == "rank 0 is stalled in step 7: computing"


def test_many_ranks_are_counted():
    computing = Progress.at(COMPUTING, 7)
    ranks = peers(*[computing] * 9, silent={rank: 99.0 for rank in range(1, 9)})
    assert "rank 4 no longer" in blame(ranks, 60.0) and "; 4 more (" in blame(ranks, 60.0)
