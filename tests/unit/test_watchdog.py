"""The watchdog of one process, whose peers are played by the test."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from graphtrain.config.schema import Watchdog as Settings
from graphtrain.run import agreement, watchdog
from graphtrain.run.stalls import COMPUTING, DATA, Progress
from lowering.errors import PeerLost, RankEnded, RankFailed
from lowering.machine import rank_threads
from lowering.machine.target import Target
from lowering.xla import distributed, lost_ranks
from lowering.xla.heartbeats import Heartbeat, Heartbeats


def answer_without_peers(self: Heartbeats) -> None:
    """The service answers, while the other ranks publish nothing."""

    def answer() -> None:
        while not self._stopped:
            self.answered_at = time.monotonic()
            time.sleep(0.05)

    threading.Thread(target=answer, daemon=True).start()


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "count", lambda: 2)
    monkeypatch.setattr(distributed, "rank", lambda: 1)


class Ended(BaseException):
    """The process has ended."""


def on_the_end(monkeypatch: pytest.MonkeyPatch, exit_process: Callable[[], None]) -> list:
    """Let a function take the place of the end of the process; return what it says at its end."""
    said = []

    def end(status: int) -> None:
        said.append(status)
        exit_process()

    os = SimpleNamespace(_exit=end, write=lambda file, text: said.append(text.decode()))
    monkeypatch.setattr(watchdog, "os", os)
    monkeypatch.setattr(watchdog, "_AGREE_SECONDS", 0.0)
    return said


def test_a_rank_that_is_lost_before_its_first_heartbeat_is_named(
    two_processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    ended = threading.Event()

    def exit_process() -> None:
        ended.set()
        threading.Event().wait()  # it does not return

    said = on_the_end(monkeypatch, exit_process)
    monkeypatch.setattr(Heartbeats, "start", answer_without_peers)
    observer = watchdog.Watchdog(Settings(step_timeout=1.0), tmp_path)
    observer.start()
    assert ended.wait(20)
    observer.close()
    message, status = said
    assert message.startswith(
        "error: rank 0 no longer responds: no heartbeat for 1 s, last in its s"
    )
    assert status == 75
    assert "most recent call first" in (tmp_path / "stacks/rank-1.txt").read_text()


def test_the_loss_of_a_rank_does_not_wait_for_ranks_that_wait_for_it(
    two_processes, monkeypatch: pytest.MonkeyPatch
):
    def lose() -> None:
        raise PeerLost("rank 3 has ended")

    monkeypatch.setattr(lost_ranks, "is_watched", threading.Event())
    monkeypatch.setattr(distributed, "all_gather_text", lambda word: pytest.fail("waits"))
    lost_ranks.is_watched.set()
    with pytest.raises(PeerLost, match="rank 3 has ended"):
        agreement.on_all_ranks(lose)


def reported(
    monkeypatch: pytest.MonkeyPatch, path: Path, error: Exception, peer: Progress, **state: object
) -> tuple[str, int] | None:
    """What rank 1, in step 7, ends with after an error; None if the error remains its own.

    Args:
        monkeypatch: of the test.
        path: directory of the run.
        error: raised by a command to its rank process.
        peer: progress of rank 0.
        state: more of what rank 0 publishes.
    """

    def end() -> None:
        raise Ended

    said = on_the_end(monkeypatch, end)
    observer = watchdog.Watchdog(Settings(step_timeout=0.5), path)
    observer.move(COMPUTING, 7)
    text = "1 " + json.dumps({"at": astuple(peer), "not_running": {}} | state)
    observer._heartbeats.peers[0] = Heartbeat(text, time.monotonic() + 100)  # it never falls silent
    observer._heartbeats.answered_at = time.monotonic() + 100
    try:
        observer.report(error)
    except Ended:
        message, status = said
        return message, status
    return None


FAILED = "rank 1: RuntimeError: Launch kernel failed: AllReduce"
BEHIND = Progress.at(DATA, 6)


def test_a_failed_collective_is_blamed_on_the_process_that_stays_behind(
    two_processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for error in (RankFailed(FAILED), RankEnded(FAILED)):
        ended = reported(monkeypatch, tmp_path, error, BEHIND)
        assert ended is not None and ended[1] == 75
        assert "rank 0 is behind, stalled in step 6: waiting for the data" in ended[0]
        assert "AllReduce" not in ended[0]


def test_a_failed_collective_is_blamed_on_a_stopped_rank_and_not_on_one_that_has_ended(
    two_processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    here = Progress.at(COMPUTING, 7)
    stopped = {"not_running": {"0": "is stopped (SIGSTOP)"}}
    ended = reported(monkeypatch, tmp_path, RankFailed(FAILED), here, **stopped)
    assert ended is not None and "rank 0 is stopped (SIGSTOP), in step 7" in ended[0]
    others_end = {"not_running": {"0": "has ended"}}
    assert reported(monkeypatch, tmp_path, RankFailed(FAILED), here, **others_end) is None


def test_the_error_of_a_rank_remains_its_own_if_nobody_is_behind_or_all_have_agreed_on_it(
    two_processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    here = Progress.at(COMPUTING, 7)
    assert reported(monkeypatch, tmp_path, RankFailed(FAILED), here) is None
    agreed = RankFailed(FAILED)
    agreed.others_are_there = True
    assert reported(monkeypatch, tmp_path, agreed, BEHIND) is None


def test_ranks_that_are_threads_are_named_with_the_collective(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    observer = watchdog.Watchdog(Settings(), tmp_path)
    observer.largest_collective = (
        "probably in one of its collectives (the largest: all-reduce over data)"
    )
    observer.move(COMPUTING, 7)
    words = "rank 2 has not returned from the device, the others have"
    monkeypatch.setattr(rank_threads, "describe_waiting", lambda: words)
    assert observer._blame(60.0) == f"{words}, in step 7: computing, {observer.largest_collective}"


def test_processes_that_start_several_ranks_are_told_from_ranks(monkeypatch: pytest.MonkeyPatch):
    assert distributed.names([1]) == "rank 1" and distributed.names([0, 2]) == "ranks 0, 2"
    assert distributed.names(range(9)).endswith("6, 7, ...")
    monkeypatch.setattr(distributed, "_ranks_per_process", 4)
    assert distributed.names([0, 1]) == "process 0 (ranks 0 to 3), process 1 (ranks 4 to 7)"


@pytest.mark.parametrize(
    ("target", "ranks"),
    [("ascend-cpu:2x2", 2), ("ascend910b:16", 8), ("ascend-cpu:4", 1), ("cpu:2x4", 1)],
)
def test_only_targets_of_mindspore_have_several_ranks_for_a_process(target, ranks):
    assert Target.parse(target).ranks_per_process == ranks
