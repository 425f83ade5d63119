"""Lock that gives one process the right to write into the directory of a run."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from graphtrain.errors import TrainingError
from graphtrain.files import write_errors


@contextmanager
def locked_run_directory(directory: Path) -> Iterator[None]:
    """Create and lock the directory of a run, so that no other process writes into it.

    A directory that was created here and is still empty at the end is removed again.

    Raises:
        TrainingError: another process has the lock, or the directory cannot be written.
    """
    from filelock import FileLock, Timeout

    path = directory / ".lock"
    lock = FileLock(path, blocking=False)
    with write_errors(directory):
        new = not directory.exists()
        directory.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise TrainingError(f"another process is training into {directory}") from None
    try:
        yield
    finally:
        with suppress(OSError):  # another process uses the directory by now, or removed it
            if new and list(directory.iterdir()) == [path]:
                path.unlink()
                directory.rmdir()
        lock.release()
