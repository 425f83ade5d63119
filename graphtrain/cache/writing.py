"""Atomic creation, replacement and removal of files and directories in a cache."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from graphtrain.cache.layout import StorePaths
from graphtrain.cache.sizes import format_size
from graphtrain.errors import CacheError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_WRONG_FILE_KIND = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST)


@contextmanager
def write_errors(path: Path, nbytes: int) -> Iterator[None]:
    """Convert an OSError of the block into a CacheError about writing `path`.

    Args:
        path: file or directory that the block writes.
        nbytes: size to report in the error; 0 to report none.

    Raises:
        CacheError: the disk is full, or path cannot be written; the message includes a remedy.
    """
    try:
        yield
    except OSError as error:
        need = f" ({format_size(nbytes)} needed)" if nbytes else ""
        remedy = "choose another cache directory with --cache DIR or GRAPHTRAIN_CACHE"
        if error.errno in _FULL:
            remedy = f"free space, for example with `graphtrain cache gc`, or {remedy}"
        if error.errno in _WRONG_FILE_KIND:
            remedy = f"a file or directory of the wrong kind is in the way; remove it, or {remedy}"
        raise CacheError(f"cannot write {path}{need}: {error.strerror}; {remedy}") from error


@contextmanager
def remove_errors(path: Path) -> Iterator[None]:
    """Convert an OSError of the block into a CacheError about removing `path`.

    Raises:
        CacheError: path cannot be removed.
    """
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"cannot remove {path}: {error.strerror}; run garbage collection as a user, and on a "
            "machine, with write access to the cache"
        ) from error


@contextmanager
def temporary_directory(layout: StorePaths) -> Iterator[Path]:
    """Create a directory on the cache's file system; remove it afterwards, unless renamed."""
    path = temporary_path(layout)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def write_file(path: Path, data: bytes) -> None:
    """Create a new file and flush it to disk (fsync)."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(layout: StorePaths, path: Path, data: bytes) -> None:
    """Create or replace a file atomically: readers see the complete old or new contents."""
    temporary = temporary_path(layout)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_file(temporary, data)
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if (
            error.errno != errno.EINVAL
        ):  # some network file systems do not support fsync of directories
            raise
    finally:
        os.close(descriptor)


def remove_directory(layout: StorePaths, path: Path) -> None:
    """Remove a directory atomically for readers: rename it first, then delete its files."""
    doomed = temporary_path(layout)
    with suppress(FileNotFoundError):  # another process has removed it
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def quarantine(layout: StorePaths, path: Path, reason: str) -> Path | None:
    """Move an unusable entry to quarantine with a file stating the reason; None if that fails."""
    directory = layout.quarantine / f"{path.stem}.{os.urandom(3).hex()}"
    moved = directory / path.name
    try:
        directory.mkdir(parents=True)
        (directory / "reason.txt").write_text(f"{reason}\n")
        os.rename(path, moved)
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)
        return None
    return moved


def temporary_path(layout: StorePaths) -> Path:
    """Return a new path with host and process id, so that leftovers can be recognized."""
    layout.temporary.mkdir(parents=True, exist_ok=True)
    return layout.temporary / f"{os.uname().nodename}.{os.getpid()}.{os.urandom(6).hex()}"


def is_stale(path: Path, *, now: float) -> bool:
    """Return whether a temporary path is a leftover: older than a day, or its owner is dead.

    A process in another container can share this host's name but not its process ids, and then
    looks dead; the minimum age of ten minutes is longer than any single write.
    """
    age = now - path.lstat().st_mtime
    host, _, pid = path.name.rpartition(".")[0].rpartition(".")
    dead = host == os.uname().nodename and pid.isdecimal() and not _is_alive(int(pid))
    return age > 86_400 or (dead and age > 600)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # the process belongs to another user
    return True
