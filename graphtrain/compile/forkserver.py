"""Processes for workers: begun by a forkserver that has imported what they need, ended whole."""

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from graphtrain.errors import GraphtrainError

_SCRATCH = "graphtrain-compile-"
_STARTS = 3  # times that a worker is begun, where its forkserver is killed meanwhile
_PAUSE = 0.5  # seconds until the kernel says that it is gone


class ForkServer:
    """Begins workers."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["graphtrain.compile.worker"])

    def start(self, *arguments: Any) -> tuple[Any, Connection]:
        """Start a process with arguments for worker.work; return it and its report pipe.

        Raises:
            GraphtrainError: the forkserver is killed again and again.
        """
        for _ in range(_STARTS):
            ours, theirs = self._context.Pipe(duplex=False)
            process = self._context.Process(target=_work, args=(*arguments, theirs), daemon=True)
            try:
                process.start()
            except (EOFError, ConnectionError):  # the forkserver is gone; the next start makes one
                ours.close()
                time.sleep(_PAUSE)
            else:
                return process, ours
            finally:
                theirs.close()
        raise GraphtrainError(
            "the process that begins the compilers was killed again and again; the machine may be "
            "out of memory, try --jobs 1"
        )


def end(process: Any) -> None:
    """Leave nothing of a worker behind; a compiler that it started is in its process group."""
    with suppress(ProcessLookupError):  # nothing is left, or it has not made its group yet
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory for workers; those of commands that were killed are removed as well."""
    for path in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        owner = path.name.removeprefix(_SCRATCH).partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            shutil.rmtree(path, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _work(*arguments: Any) -> None:
    """Begin a worker; the name by which the forkserver's children find it."""
    from graphtrain.compile.worker import work

    work(*arguments)
