"""The processes that compute: one for each rank, with MindSpore in it, started by msrun.

This process imports no MindSpore. It keeps a connection to every rank, says the same to all at the
same time, and waits for all: their collectives wait for each other.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from lowering.errors import LoweringError

KEY = "GRAPHTRAIN_RANKS_KEY"
ADDRESS = "GRAPHTRAIN_RANKS_ADDRESS"
DEVICE = "GRAPHTRAIN_RANKS_DEVICE"

_PATIENCE = 180  # seconds for all ranks to begin
_SCRIPT = Path(__file__).with_name("rank.py")


class Ranks:
    """Connections to the ranks of one machine. Arrays there are known here by number."""

    def __init__(self, count: int, device: str) -> None:
        """Start them.

        Args:
            device: MindSpore's name: CPU or Ascend.

        Raises:
            LoweringError: MindSpore is not installed, or the ranks do not begin.
        """
        self.count = count
        self._numbers = itertools.count()
        self._given_up: list[int] = []
        self._then: Callable[[list[Any]], None] | None = None  # answers are due
        self.directory = Path(tempfile.mkdtemp(prefix="graphtrain-ranks-"))
        atexit.register(self.close)
        key = secrets.token_hex(16)
        self._key = key.encode()
        listener = Listener(str(self.directory / "ranks"), "AF_UNIX", authkey=self._key)
        environment = os.environ | {
            KEY: key,
            ADDRESS: str(self.directory / "ranks"),
            DEVICE: device,
            # msrun starts the first "python" that it finds.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path))),
        }
        environment.setdefault("GLOG_v", "3")  # MindSpore's errors, not its warnings
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                self._command(count),
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for this process alone
            )
        self._connections = self._meet(listener)

    @property
    def _log(self) -> Path:
        return self.directory / "log.txt"

    def _command(self, count: int) -> list[str]:
        if count == 1:
            return [sys.executable, str(_SCRIPT)]
        msrun = shutil.which("msrun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if msrun is None:
            raise LoweringError("msrun, which comes with MindSpore, is not on the PATH")
        port = _free_port()
        return [
            msrun, f"--worker_num={count}", f"--local_worker_num={count}", "--join=True",
            "--master_addr=127.0.0.1", f"--master_port={port}",
            f"--log_dir={self.directory}", str(_SCRIPT),
        ]  # fmt: skip

    def _meet(self, listener: Listener) -> list[Connection]:
        """Accept every rank; what they say first is who they are, or why they cannot begin."""
        until = time.monotonic() + _PATIENCE
        for pause in (self._process.wait, functools.partial(time.sleep, _PATIENCE)):
            threading.Thread(target=self._wake, args=(pause,), daemon=True).start()
        met: dict[int, Connection] = {}
        try:
            # All are let in before any is listened to: each begins only when all have.
            waiting: list[Any] = [listener.accept() for _ in range(self.count)]
            while waiting:
                ready: Any = wait(waiting, max(0.0, until - time.monotonic()))
                for connection in ready or waiting:
                    rank = self._who(connection if ready else None)
                    waiting.remove(connection)
                    met[rank] = connection
        except LoweringError:
            self._kill()
            raise
        finally:
            listener.close()
        return [met[rank] for rank in range(self.count)]

    def _who(self, connection: Connection | None) -> int:
        """The rank at the other end.

        Raises:
            LoweringError: it did not begin, or nobody is there in time.
        """
        try:
            rank, failed = (None, "") if connection is None else connection.recv()
        except (OSError, EOFError):
            rank, failed = None, ""
        if failed:
            raise LoweringError(f"a rank did not begin: {failed}")
        if rank is None:
            raise LoweringError(f"the ranks did not begin: {self._last_words()}")
        return rank

    def _wake(self, pause: Callable[[], Any]) -> None:
        """Come in place of a rank, once they have ended or it took too long; a listener that is
        closed would go on waiting."""
        pause()
        address = str(self.directory / "ranks")
        with contextlib.suppress(OSError, EOFError), Client(address, "AF_UNIX", authkey=self._key):
            pass  # it has nothing to say

    def new_number(self) -> int:
        return next(self._numbers)

    def give_up(self, number: int) -> None:
        """Forget an array, with the next thing that is said."""
        self._given_up.append(number)

    def tell(self, word: str, of_rank: Callable[[int], Sequence[Any]]) -> list[Any]:
        """Say something to every rank, each with its own arguments; what they answer.

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
            then: called with the answers, before anything else is said.
        """
        self.settle()
        gone, self._given_up = self._given_up, []
        with self._telling_of_ends():
            for rank, connection in enumerate(self._connections):
                connection.send((word, gone, *of_rank(rank)))
        self._then = then

    def settle(self) -> None:
        """Wait for the answers to what was said last; raises as tell."""
        if self._then is not None:
            self._answers()

    def _answers(self) -> list[Any]:
        then, self._then = self._then, None
        with self._telling_of_ends():
            answers = [connection.recv() for connection in self._connections]
        for rank, (is_well, answer) in enumerate(answers):
            if not is_well:
                raise LoweringError(f"rank {rank}: {answer}")
        answers = [answer for _, answer in answers]
        if then is not None:
            then(answers)
        return answers

    @contextlib.contextmanager
    def _telling_of_ends(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError):
            raise LoweringError(f"a rank has ended: {self._last_words()}") from None

    def _last_words(self) -> str:
        logs = [self._log, *sorted(self.directory.glob("*.log"))]
        lines = [
            line.strip()
            for log in logs
            if log.exists()
            for line in log.read_text(errors="replace").splitlines()
        ]
        telling = [line for line in lines if "Error" in line or "error" in line]
        return " / ".join((telling or lines)[-3:]) or "they said nothing"

    def close(self) -> None:
        """End them."""
        for connection in getattr(self, "_connections", []):
            with contextlib.suppress(OSError):
                connection.close()  # a rank ends when nobody is there any more
        process = getattr(self, "_process", None)
        if process is not None:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
