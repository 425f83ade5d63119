"""Ranks that are threads of this process, one for each device."""

import threading

import pytest

from lowering.errors import LoweringError
from lowering.machine.rank_threads import RankThreads, describe_waiting


def test_results_are_in_the_order_of_ranks_and_all_ranks_run_at_the_same_time():
    barrier, threads = threading.Barrier(3), RankThreads(3)
    for factor in (2, 3):
        assert threads.call(lambda rank, f=factor: (barrier.wait(10), f * rank)[1]) == [
            0, factor, 2 * factor,
        ]  # fmt: skip
    assert describe_waiting() == ""


def test_a_rank_that_fails_is_named_while_the_others_wait_for_it():
    others, threads = threading.Event(), RankThreads(3)

    def fail(rank: int) -> None:
        if rank == 1:
            raise LoweringError("nrt_execute returned 6: hardware error")
        others.wait(60)

    with pytest.raises(LoweringError, match=r"^rank 1: nrt_execute returned 6: hardware error"):
        threads.call(fail)
    others.set()


def test_the_ranks_that_have_not_returned_are_named():
    hanging, release, threads = threading.Event(), threading.Event(), RankThreads(4)
    returned = threading.Barrier(3)

    def hang(rank: int) -> None:
        if rank == 2:
            hanging.set()
            release.wait(60)
        else:
            returned.wait(60)

    caller = threading.Thread(target=threads.call, args=(hang,))
    caller.start()
    assert hanging.wait(60)
    while len(threads.waiting()) > 1:
        pass
    assert describe_waiting() == "rank 2 has not returned from the device, the others have"
    release.set()
    caller.join(60)
    assert describe_waiting() == ""


def test_ranks_that_all_wait_are_not_told_apart():
    release, threads = threading.Event(), RankThreads(2)
    caller = threading.Thread(target=threads.call, args=(lambda rank: release.wait(60),))
    caller.start()
    while not (words := describe_waiting()):
        pass
    release.set()
    caller.join(60)
    assert words == "none of the 2 ranks of this process has returned from its device"
