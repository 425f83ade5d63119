"""Connections to the processes that compute: one with MindSpore for each rank.

This process does not import MindSpore. It sends the same command to all ranks of its host at the
same time, and waits for all answers, because collectives synchronize the ranks of all hosts; the
other processes of the run send the same command to theirs.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from lowering.ascend.launch import START_TIMEOUT, Cluster, RankProcesses
from lowering.errors import LoweringError, PeerLost, RankEnded, RankFailed
from lowering.machine.rendezvous import names
from lowering.xla import lost_ranks

_POLL_SECONDS = (
    1.0  # seconds between checks for ranks that died; child processes may keep connections open
)


class Ranks:
    """Connections to the ranks of this host, whose arrays are referred to by ids (numbers)."""

    def __init__(self, cluster: Cluster, device: str) -> None:
        """Start the ranks.

        Args:
            cluster: ranks of the run and of this host.
            device: MindSpore's name: CPU or Ascend.

        Raises:
            PeerLost: a rank was killed before all have started.
            LoweringError: a rank did not start.
        """
        self.local_ranks = cluster.local_ranks
        self._array_ids = itertools.count()
        self._deleted_ids: list[int] = []
        self._then: Callable[[list[Any]], None] | None = None  # set while answers are due
        self.directory = Path(tempfile.mkdtemp(prefix="graphtrain-ranks-"))
        atexit.register(self.close)
        self._launched = RankProcesses(cluster, device, self.directory)
        self._connections = self._launched.connections
        self._have_started = False
        with self._ending_all():
            started = self._receive(time.monotonic() + START_TIMEOUT)
        self._have_started = True
        for rank, (reported_rank, failed) in started.items():
            if failed or reported_rank != rank:
                self._launched.kill()
                reason = failed or f"MindSpore assigned it rank {reported_rank}"
                raise LoweringError(f"rank {rank} did not start: {reason}")

    def new_array_id(self) -> int:
        """Return a new id for an array."""
        return next(self._array_ids)

    def delete_array(self, number: int) -> None:
        """Delete an array on the ranks, with the next command."""
        self._deleted_ids.append(number)

    def call(self, word: str, of_rank: Callable[[int], Sequence[Any]]) -> list[Any]:
        """Send a command to every rank, each with its own arguments; return the answers by rank.

        Raises:
            LoweringError: a rank failed or died, possibly in the previous command.
        """
        self.send(word, of_rank)
        return self._answers()

    def send(
        self,
        word: str,
        of_rank: Callable[[int], Sequence[Any]],
        then: Callable[[list[Any]], None] = lambda answers: None,
    ) -> None:
        """Send a command without waiting for the answers.

        Args:
            word: name of the method of `Rank` to call.
            of_rank: returns the arguments for a rank, by its number among all hosts.
            then: called with the answers, before the next command is sent.

        Raises:
            LoweringError: a rank failed or died in the previous command.
        """
        self.wait_for_answers()
        deleted_ids, self._deleted_ids = self._deleted_ids, []
        with self._ending_all():
            for rank, connection in self._connections.items():
                try:
                    connection.send((word, deleted_ids, *of_rank(rank)))
                except OSError:
                    raise self._has_ended(rank) from None
        self._then = then

    def wait_for_answers(self) -> None:
        """Wait for the answers to the last command; raise an error as `send` does."""
        if self._then is not None:
            self._answers()

    def _answers(self) -> list[Any]:
        then, self._then = self._then, None
        with self._ending_all():
            replies = self._receive()
        for rank, (succeeded, answer) in replies.items():
            if not succeeded:
                raise RankFailed(f"rank {rank}: {answer}")
        answers = [answer for _, answer in replies.values()]
        if then is not None:
            then(answers)
        return answers

    def _receive(self, until: float = float("inf")) -> dict[int, Any]:
        """Receive the next answer of every rank; return the answers by rank.

        Raises:
            LoweringError: a rank has ended, or did not answer until the time `until`.
        """
        waiting: dict[Connection, int] = {each: rank for rank, each in self._connections.items()}
        replies: dict[int, Any] = {}
        while waiting:
            ready: Any = wait(list(waiting), _POLL_SECONDS)
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    replies[rank] = connection.recv()
                except (OSError, EOFError):
                    raise self._has_ended(rank) from None
            for rank in waiting.values() if not ready else ():
                if self._launched.has_ended(rank):
                    raise self._has_ended(rank)
            if time.monotonic() > until:
                there = f" ({names(replies)} did)" if replies else ""
                raise LoweringError(
                    f"{names(waiting.values())} did not start within {START_TIMEOUT} s{there}"
                )
        return {rank: replies[rank] for rank in self.local_ranks}

    def _has_ended(self, rank: int) -> LoweringError:
        message = f"rank {rank} has ended ({self._launched.end_of(rank)})"
        was_killed = self._launched.was_killed(rank)
        if self._have_started:
            return PeerLost(message) if was_killed else RankEnded(message)
        # A rank that ends by itself would do so again: MindSpore or the device cannot be used.
        kind = PeerLost if was_killed else LoweringError
        return kind(f"{message} before all ranks had started")

    @contextlib.contextmanager
    def _ending_all(self) -> Iterator[None]:
        """Kill all ranks on an error: if one has ended, the others would wait forever.

        A watchdog of the run lets them write their stacks before it kills them.
        """
        try:
            yield
        except LoweringError as error:
            if not (isinstance(error, PeerLost) and lost_ranks.is_watched.is_set()):
                self._launched.kill()
            raise

    def close(self) -> None:
        """Stop the ranks and delete their directory."""
        for connection in self._connections.values() if hasattr(self, "_connections") else ():
            with contextlib.suppress(OSError):
                connection.close()  # a rank ends when its connection closes
        if hasattr(self, "_launched"):
            self._launched.wait(5)
            self._launched.kill()
        shutil.rmtree(self.directory, ignore_errors=True)
