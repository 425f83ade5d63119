"""The processes that compute: one for each rank, with MindSpore in it.

This process imports no MindSpore. It keeps a connection to every rank of its host, says the same to
all at the same time, and waits for all: their collectives wait for each other, and for those of
other hosts, to which other processes of the run say the same.
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

from lowering.ascend.launch import PATIENCE, Cluster, Launched
from lowering.errors import LoweringError

_LOOK = 1.0  # seconds between looks at ranks that do not answer: a child may hold their connection


class Ranks:
    """Connections to the ranks of this host. Arrays there are known here by number."""

    def __init__(self, cluster: Cluster, device: str) -> None:
        """Start them.

        Args:
            device: MindSpore's name: CPU or Ascend.

        Raises:
            LoweringError: the ranks do not begin.
        """
        self.mine = cluster.mine
        self._numbers = itertools.count()
        self._given_up: list[int] = []
        self._then: Callable[[list[Any]], None] | None = None  # answers are due
        self.directory = Path(tempfile.mkdtemp(prefix="graphtrain-ranks-"))
        atexit.register(self.close)
        self._launched = Launched(cluster, device, self.directory)
        self._connections = self._launched.connections
        with self._ending_all():
            begun = self._heard(time.monotonic() + PATIENCE)
        for rank, (number, failed) in begun.items():
            if failed or number != rank:
                self._launched.kill()
                what = failed or f"MindSpore calls it rank {number}"
                raise LoweringError(f"rank {rank} did not begin: {what}")

    def new_number(self) -> int:
        return next(self._numbers)

    def give_up(self, number: int) -> None:
        """Forget an array, with the next thing that is said."""
        self._given_up.append(number)

    def tell(self, word: str, of_rank: Callable[[int], Sequence[Any]]) -> list[Any]:
        """Say something to every rank, each with its own arguments; what they answer, in order.

        Raises:
            LoweringError: one failed, or died; perhaps over what it was told before.
        """
        self.begin(word, of_rank)
        return self._answers()

    def begin(
        self,
        word: str,
        of_rank: Callable[[int], Sequence[Any]],
        then: Callable[[list[Any]], None] = lambda answers: None,
    ) -> None:
        """Say something without waiting for the answers; raises as tell, of what was said before.

        Args:
            of_rank: arguments for a rank, by its number among those of all hosts.
            then: called with the answers, before anything else is said.
        """
        self.settle()
        gone, self._given_up = self._given_up, []
        with self._ending_all():
            for rank, connection in self._connections.items():
                try:
                    connection.send((word, gone, *of_rank(rank)))
                except OSError:
                    raise self._has_ended(rank) from None
        self._then = then

    def settle(self) -> None:
        """Wait for the answers to what was said last; raises as tell."""
        if self._then is not None:
            self._answers()

    def _answers(self) -> list[Any]:
        then, self._then = self._then, None
        with self._ending_all():
            heard = self._heard()
        for rank, (is_well, answer) in heard.items():
            if not is_well:
                raise LoweringError(f"rank {rank}: {answer}")
        answers = [answer for _, answer in heard.values()]
        if then is not None:
            then(answers)
        return answers

    def _heard(self, until: float = float("inf")) -> dict[int, Any]:
        """What every rank says next, by rank.

        Raises:
            LoweringError: one has ended, on which the others wait in vain, or is late.
        """
        waiting: dict[Connection, int] = {each: rank for rank, each in self._connections.items()}
        heard: dict[int, Any] = {}
        while waiting:
            ready: Any = wait(list(waiting), _LOOK)
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    heard[rank] = connection.recv()
                except (OSError, EOFError):
                    raise self._has_ended(rank) from None
            for rank in waiting.values() if not ready else ():
                if self._launched.has_ended(rank):
                    raise self._has_ended(rank)
            if time.monotonic() > until:
                late = ", ".join(map(str, waiting.values()))
                raise LoweringError(f"the ranks did not begin in {PATIENCE} s: no word of {late}")
        return {rank: heard[rank] for rank in self.mine}

    def _has_ended(self, rank: int) -> LoweringError:
        return LoweringError(f"rank {rank} has ended ({self._launched.end_of(rank)})")

    @contextlib.contextmanager
    def _ending_all(self) -> Iterator[None]:
        """Where one rank has ended the others wait in vain."""
        try:
            yield
        except LoweringError:
            self._launched.kill()
            raise

    def close(self) -> None:
        """End them."""
        for connection in self._connections.values() if hasattr(self, "_connections") else ():
            with contextlib.suppress(OSError):
                connection.close()  # a rank ends when nobody is there any more
        if hasattr(self, "_launched"):
            self._launched.wait(5)
            self._launched.kill()
        shutil.rmtree(self.directory, ignore_errors=True)
