"""Start and end worker processes, with a forkserver that has imported their modules."""

import multiprocessing.util
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
from lowering.machine.worker_processes import worker_context

_SCRATCH = "graphtrain-compile-"
_OWNER = "graphtrain-owner"  # file with a process id, in the directory of multiprocessing's socket
_START_ATTEMPTS = 3  # attempts to start a worker, in case the forkserver is killed meanwhile
_PAUSE = 0.5  # seconds until the kernel reports that the forkserver has ended


class ForkServer:
    """Forkserver that starts worker processes."""

    def __init__(self) -> None:
        self._context = worker_context("graphtrain.compile.worker")
        # Its name, pymp-XXXXXXXX, does not contain the owner, and a killed owner leaves it.
        Path(multiprocessing.util.get_temp_dir(), _OWNER).write_text(str(os.getpid()))

    def start(self, *arguments: Any) -> tuple[Any, Connection]:
        """Start a worker; return its process and the pipe on which it sends messages.

        Args:
            arguments: arguments of graphtrain.compile.worker.work, without the pipe.

        Raises:
            GraphtrainError: the forkserver was killed at every attempt.
        """
        for _ in range(_START_ATTEMPTS):
            receiver, sender = self._context.Pipe(duplex=False)
            process = self._context.Process(target=_work, args=(*arguments, sender), daemon=True)
            try:
                process.start()
            except (EOFError, ConnectionError):  # the forkserver has ended; start() creates another
                receiver.close()
                time.sleep(_PAUSE)
            else:
                return process, receiver
            finally:
                sender.close()
        raise GraphtrainError(
            f"the forkserver of the compiler processes was killed {_START_ATTEMPTS} times; the "
            "machine may be out of memory; try --jobs 1"
        )


def kill_worker(process: Any) -> None:
    """Kill a worker and its process group, which includes a compiler that it started."""
    with suppress(ProcessLookupError):  # the group has ended or does not exist yet
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Create a temporary directory for workers; remove those left by killed commands."""
    _remove_stale_directories(Path(tempfile.gettempdir()))
    path = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_stale_directories(parent: Path) -> None:
    """Remove the temporary directories of commands that were killed."""
    owners = {
        path: path.name.removeprefix(_SCRATCH).partition("-")[0]
        for path in parent.glob(f"{_SCRATCH}*")
    }
    for path in parent.glob(f"pymp-*/{_OWNER}"):
        with suppress(OSError, ValueError):  # of another user, or removed by its owner
            owners[path.parent] = path.read_text()
    for path, owner in owners.items():
        if owner.isdecimal() and not Path("/proc", owner).exists():
            shutil.rmtree(path, ignore_errors=True)


def _work(*arguments: Any) -> None:
    """Run a worker; a module-level function, so that children of the forkserver can import it."""
    from graphtrain.compile.worker import worker_main

    worker_main(*arguments)
