"""Directories that a command writes: complete or absent, with a remedy where writing fails."""

import errno
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphtrain.errors import TrainingError, WeightsError


@contextmanager
def create_directory(destination: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to `destination` if the block succeeds.

    Raises:
        WeightsError: `destination` exists and is not an empty directory, or writing fails.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise WeightsError(f"{destination} exists already; remove it or choose another name")
    unfinished = unfinished_name(destination)
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        if destination.exists():
            destination.rmdir()
        unfinished.rename(destination)
    except OSError as error:
        raise WeightsError(f"{destination} cannot be written: {error}") from error
    finally:
        _remove_directory(unfinished)


def unfinished_name(destination: Path) -> Path:
    """Return the name of a directory until it is complete."""
    return destination.with_name(f".{destination.name}.unfinished")


def _remove_directory(directory: Path) -> None:
    """Remove a directory, with retries: after an error TensorStore still completes writes."""
    for _ in range(20):
        if not directory.exists():
            return
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.1)


@contextmanager
def write_errors(directory: Path) -> Iterator[None]:
    """Convert an OSError on writing to a run directory to a TrainingError with a remedy.

    Raises:
        TrainingError: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{directory} cannot be written ({error.strerror or error}); {_write_remedy(error)}set "
            "run.directory to another path"
        ) from error


def _write_remedy(error: OSError) -> str:
    """Return what to do where a file cannot be written, as the beginning of "..., or ..."."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space there, or "
    if error.errno in (errno.EEXIST, errno.ENOTDIR) and error.filename:
        path = Path(error.filename)
        in_the_way = next((one for one in (path, *path.parents) if one.is_file()), path)
        return f"remove the file {in_the_way}, or "
    return ""
