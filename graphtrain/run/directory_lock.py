"""Who writes into the directory of a run."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from graphtrain.errors import TrainingError
from graphtrain.run.metrics import writing


@contextmanager
def owned(directory: Path) -> Iterator[None]:
    """Let no two processes write into one run; a new directory stays only if something is in it.

    Raises:
        TrainingError: another process owns it, or it cannot be written.
    """
    from filelock import FileLock, Timeout

    path = directory / ".lock"
    lock = FileLock(path, blocking=False)
    with writing(directory):
        new = not directory.exists()
        directory.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise TrainingError(f"another process is training into {directory}") from None
    try:
        yield
    finally:
        with suppress(OSError):  # another process has come into it, or removed it
            if new and list(directory.iterdir()) == [path]:
                path.unlink()
                directory.rmdir()
        lock.release()
