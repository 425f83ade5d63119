"""Worker processes that do not import the user's script.

Python starts a worker by importing the main module of its parent again. A script without
`if __name__ == "__main__"` would then run a second time in every worker. Workers of graphtrain
need nothing of it: what is sent to them is defined in importable modules.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType

_lock = threading.Lock()
_environment: dict[str, str] = {}  # of the running forkserver


class WorkerProcess(ForkServerProcess):
    """Child of the forkserver without the main module of the parent."""

    def start(self) -> None:
        """Start the process."""
        with _without_main():
            super().start()


class WorkerContext(ForkServerContext):
    """Context of multiprocessing that starts worker processes."""

    Process = WorkerProcess


def worker_context(preload: str) -> WorkerContext:
    """Return the context that starts workers, whose forkserver imports a module once for all.

    A forkserver keeps the environment of its start. In a notebook, variables may change until the
    next compilation, and keys digest their current values; so another one is started then.
    """
    environment = dict(os.environ)
    if _environment and _environment != environment:
        forkserver._forkserver._stop()  # pyright: ignore[reportAttributeAccessIssue]
    _environment.clear()
    _environment.update(environment)
    context = WorkerContext()
    context.set_forkserver_preload([preload])
    return context


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module from multiprocessing, which finds it in sys.modules."""
    with _lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
