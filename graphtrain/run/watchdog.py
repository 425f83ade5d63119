"""Watchdog of a run: ends all processes with one message when one of them hangs or is lost.

A thread of every process compares the time of the current step with its limit, and the heartbeats
of the other ranks with theirs. The main thread may be blocked in a collective that never returns,
so the thread itself writes the stacks, prints the message and ends the process.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from graphtrain.config.schema import Watchdog as Settings
from graphtrain.run.stalls import (
    LOADING,
    Peer,
    Progress,
    Stopwatch,
    behind,
    blame,
    in_collective,
    max_silence,
)
from lowering.errors import PeerLost, RankEnded, RankFailed
from lowering.machine import rank_processes, rank_threads
from lowering.machine.rank_processes import HAS_ENDED
from lowering.xla import distributed, lost_ranks
from lowering.xla.heartbeats import Heartbeats, content
from sharding_rules.errors import UserError

STATUS = PeerLost.exit_status
_AGREE_SECONDS = 5.0  # for the other ranks to learn the verdict, and to leave before rank 0
_OWN_ERROR_SECONDS = 5.0  # for this rank to report by itself an error that another one reported
_SUSPENDED_SECONDS = 4.0  # without a turn of the watchdog's thread: the process was stopped
_EXCHANGES = 6  # heartbeats without which a rank is silent, when the run is known to be broken


class Watchdog:
    """Observer of this process and its peers, on a thread of its own."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        """Create a watchdog, which `start` starts.

        Args:
            settings: limits.
            directory: of the run; stacks are written to its subdirectory "stacks".
        """
        # Asked once, because this thread must not import JAX while another one does.
        self._rank, self._count = distributed.rank(), distributed.count()
        self._name = distributed.names([self._rank])
        self._settings, self._stacks = settings, directory / "stacks"
        self._stopwatch = Stopwatch(settings)
        self._stopwatch.move(Progress.at(LOADING), time.monotonic())
        self._interval = min(1.0, max(0.1, settings.step_timeout / 10))
        self._heartbeats = Heartbeats(self._interval, self._rank, self._count)
        self._closed, self._ending = threading.Event(), threading.Lock()
        self._stopped_ranks: dict[int, tuple[str, float]] = {}  # reason and time, of this host
        self._started_at = time.monotonic()
        self._suspended = ""  # note that this process did not run for some time
        # Descriptions of collectives of a step, for the message.
        self.largest_collective, self.first_collective = "", ""
        self.before_exit: Callable[[str], None] = lambda message: None  # gets the message

    def move(self, stage: str, step: int = 0, batch: int = 0) -> None:
        """Note that this process has reached a stage of a step. Cheap; called in every step."""
        self._stopwatch.move(Progress.at(stage, step, batch), time.monotonic())

    def start(self) -> None:
        """Start to observe."""
        self._started_at = time.monotonic()
        self._publish()
        self._heartbeats.start()
        lost_ranks.is_watched.set()
        threading.Thread(target=self._observe, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop to observe; the other ranks no longer expect heartbeats of this one."""
        self._closed.set()
        lost_ranks.is_watched.clear()
        self._heartbeats.stop()

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Tell the other ranks of an error before it unwinds, which may wait for them."""
        try:
            yield
        except Exception as error:
            if not self._closed.is_set():
                self.report(error)
            raise

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends with an error; return if it is its own error.

        A lost rank is reported by an error of the collective that waits for it. So an error that is
        not the user's to fix, or is that of a rank process, which may have waited for those of
        another process, ends this process as the watchdog does, if another rank is lost or behind.
        """
        if self._count == 1 and not isinstance(error, PeerLost):
            return
        is_of_rank = isinstance(error, RankFailed | RankEnded)
        is_agreed = isinstance(error, RankFailed) and error.others_are_there
        if self._count > 1 and not is_agreed and (is_of_rank or not isinstance(error, UserError)):
            self._end_if_a_peer_is_lost(or_behind=is_of_rank)
        if isinstance(error, PeerLost):
            self._end(str(error), STATUS)
        status = getattr(error, "exit_status", 1)
        self._closed.set()  # the error is reported by the command, not by the watchdog
        first = str(error).partition("\n")[0] or type(error).__name__
        message = f"{self._name} ended with an error: {first}"
        self._heartbeats.propose(_verdict(message, status, is_error=True), _AGREE_SECONDS)

    def _end_if_a_peer_is_lost(self, *, or_behind: bool) -> None:
        """Wait until it is clear whether another rank is lost; end the process if one is.

        Args:
            or_behind: whether to end the process also if a rank stays behind during that time: the
                error is that of a collective in which this process did not wait any longer.
        """
        silence = _EXCHANGES * self._heartbeats.interval
        deadline = time.monotonic() + 2 * silence + _AGREE_SECONDS
        behind_at_first = behind(self._ranks())
        while time.monotonic() < deadline:
            if self._heartbeats.verdict is not None:
                self._end(**json.loads(self._heartbeats.verdict))
            not_running = self._ranks_not_running().items()
            # A rank that has ended may have done so for the same reason, and not be that reason.
            if stopped := {rank: why for rank, why in not_running if why != HAS_ENDED}:
                self._end(self._describe(stopped), STATUS)
            if any(peer.silent_seconds > silence for peer in self._ranks().values()):
                break
            time.sleep(self._interval / 2)
        else:
            if not (or_behind and behind_at_first.items() & behind(self._ranks()).items()):
                return
        self._end(self._blame_by_progress(silence), STATUS)

    def _observe(self) -> None:
        looked_at = time.monotonic()
        while not self._closed.wait(self._interval):
            now = time.monotonic()
            if now - looked_at > self._interval + _SUSPENDED_SECONDS:
                self._note_suspension(now - looked_at)
            looked_at = now
            self._publish()
            self._judge()

    def _note_suspension(self, seconds: float) -> None:
        """Do not count time during which this process did not run, as after SIGSTOP."""
        self._suspended = f" ({self._name} itself did not run for {seconds:.0f} s)"
        self._started_at += seconds
        self._stopwatch.extend(seconds)
        self._heartbeats.extend(seconds)

    def _publish(self) -> None:
        not_running = rank_processes.not_running()
        now = time.monotonic()
        self._stopped_ranks = {
            rank: self._stopped_ranks.get(rank, (reason, now))
            for rank, reason in not_running.items()
        }
        progress = dataclasses.astuple(self._stopwatch.progress)
        self._heartbeats.publish(json.dumps({"at": progress, "not_running": not_running}))

    def _judge(self) -> None:
        """End the process if the run cannot continue."""
        now, silence = time.monotonic(), max_silence(self._settings)
        if self._heartbeats.verdict is not None:
            verdict = json.loads(self._heartbeats.verdict)
            # An error that all ranks meet is reported by each of them itself.
            if verdict["is_error"] and self._closed.wait(_OWN_ERROR_SECONDS):
                return
            self._end(**verdict)
        if any(now - since > silence for _, since in self._stopped_ranks.values()):
            self._end(self._blame(silence), STATUS)
        if lost_ranks.connection_lost.is_set():
            self._wait_for_silence()
            self._end(self._blame(_EXCHANGES * self._heartbeats.interval), STATUS)
        ranks, stopwatch = self._ranks(), self._stopwatch
        if any(peer.silent_seconds > silence for peer in ranks.values()):
            self._end(self._blame(silence), STATUS)
        reached = [peer.progress for peer in ranks.values() if peer.progress is not None]
        others_wait = max(reached) > stopwatch.progress
        if stopwatch.seconds(now) > stopwatch.limit(others_wait=others_wait):
            silence = min(silence, _EXCHANGES * self._heartbeats.interval)
            stalled = f"no progress for {stopwatch.seconds(now):.0f} s: "
            self._end(stalled + self._blame(silence), STATUS)

    def _wait_for_silence(self) -> None:
        """Wait until the lost rank is the only one without a heartbeat."""
        self._closed.wait(_EXCHANGES * self._heartbeats.interval + self._interval)

    def _ranks(self) -> dict[int, Peer]:
        """Return what is known of all ranks."""
        now, heartbeats = time.monotonic(), self._heartbeats
        ranks = {self._rank: Peer(self._stopwatch.progress)}
        unanswered = now - heartbeats.answered_at
        is_service_silent = unanswered > 3 * heartbeats.interval
        for rank in range(self._count):
            if rank == self._rank:
                continue
            heartbeat = heartbeats.peers.get(rank)
            # All ranks connect before their watchdogs start, at nearly the same time.
            silent = now - (heartbeat.changed_at if heartbeat else self._started_at)
            if is_service_silent:  # only rank 0, which runs the service, is known to be silent
                silent = unanswered if rank == 0 else 0.0
            if heartbeat is None:
                ranks[rank] = Peer(None, silent)
                continue
            last = content(heartbeat)
            ranks[rank] = Peer(Progress(*last["at"]), silent) if last else Peer(None)  # has left
        return ranks

    def _blame(self, silence: float) -> str:
        if not_running := self._ranks_not_running():
            return self._describe(not_running)
        if waiting := rank_threads.describe_waiting():
            progress = self._stopwatch.progress
            return (
                f"{waiting}, in {in_collective(progress, self.largest_collective)}{self._suspended}"
            )
        return self._blame_by_progress(silence)

    def _blame_by_progress(self, silence: float) -> str:
        collectives = self.largest_collective, self.first_collective
        return blame(self._ranks(), silence, *collectives) + self._suspended

    def _describe(self, not_running: Mapping[str, str]) -> str:
        words = [f"rank {rank} {why}" for rank, why in not_running.items()]
        return f"{'; '.join(words)}, in {self._stopwatch.progress}{self._suspended}"

    def _ranks_not_running(self) -> dict[str, str]:
        """Return the rank processes of all hosts that do not run, with the reason."""
        not_running = {str(rank): why for rank, (why, _) in self._stopped_ranks.items()}
        for heartbeat in self._heartbeats.peers.values():
            not_running |= (content(heartbeat) or {}).get("not_running", {})
        return not_running

    def _end(self, message: str, status: int, is_error: bool = False) -> NoReturn:
        """Agree on the reason, write the stacks, print one message and end this process."""
        if not self._ending.acquire(blocking=False):
            time.sleep(3600)  # another thread is ending the process
        if not is_error:
            proposed = self._heartbeats.propose(_verdict(message, status), _AGREE_SECONDS)
            verdict = json.loads(proposed)
            message, status, is_error = verdict["message"], verdict["status"], verdict["is_error"]
        if not is_error:
            message += f"{self._write_stacks()}; start the run again to resume from its checkpoint"
        with suppress(OSError):  # not through Python, whose main thread may hold the lock of stderr
            os.write(2, f"error: {message}\n".encode())
        self.before_exit(message)
        self._heartbeats.leave()
        rank_processes.kill()
        if self._rank == 0:
            limit = _EXCHANGES * self._heartbeats.interval
            alive = [r for r, peer in self._ranks().items() if r and peer.silent_seconds < limit]
            self._heartbeats.wait_until_left(alive, _AGREE_SECONDS)
        else:
            time.sleep(2 * self._interval)  # for the last heartbeat
        os._exit(status)

    def _write_stacks(self) -> str:
        """Write the Python stacks of this rank to a file; return where the files are."""
        try:
            self._stacks.mkdir(parents=True, exist_ok=True)
            name = "process" if rank_processes.groups else "rank"
            with (self._stacks / f"{name}-{self._rank}.txt").open("w") as file:
                faulthandler.dump_traceback(file)
            rank_processes.write_stacks(self._stacks)
        except OSError as error:
            return f"; the stacks could not be written to {self._stacks} ({error.strerror})"
        return f"; stacks are in {self._stacks}"


def _verdict(message: str, status: int, is_error: bool = False) -> str:
    return json.dumps({"message": message, "status": status, "is_error": is_error})


@contextmanager
def watched(settings: Settings, directory: Path) -> Iterator[Watchdog]:
    """Observe this process during a run; yield the watchdog, which is told of its progress."""
    watchdog = Watchdog(settings, directory)
    if not settings.step_timeout:
        yield watchdog
        return
    watchdog.start()
    try:
        with watchdog.reporting_errors():
            yield watchdog
    finally:
        watchdog.close()
