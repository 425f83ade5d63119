"""How files come into a store: whole or not at all."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from graphtrain.cache.layout import Layout
from graphtrain.cache.sizes import readable
from graphtrain.errors import CacheError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST)


@contextmanager
def writing(path: Path, nbytes: int) -> Iterator[None]:
    """Report what the system refuses inside as an error about path.

    Raises:
        CacheError: the disk is full, or path cannot be written; with what to do.
    """
    try:
        yield
    except OSError as error:
        need = f" ({readable(nbytes)} needed)" if nbytes else ""
        remedy = "store elsewhere with --cache DIR or GRAPHTRAIN_CACHE"
        if error.errno in _FULL:
            remedy = f"free space, for example with `graphtrain cache gc`, or {remedy}"
        if error.errno in _IN_THE_WAY:
            remedy = f"something of another kind is in its place; remove it, or {remedy}"
        raise CacheError(f"cannot write {path}{need}: {error.strerror}; {remedy}") from error


@contextmanager
def removing(path: Path) -> Iterator[None]:
    """Report what the system refuses inside as an error about path.

    Raises:
        CacheError: path cannot be removed.
    """
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"cannot remove {path}: {error.strerror}; collect garbage as a user, and on a machine, "
            "that can write the store"
        ) from error


@contextmanager
def temporary_directory(layout: Layout) -> Iterator[Path]:
    """A new directory on the store's file system; gone afterwards, unless renamed."""
    path = temporary_path(layout)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def write_file(path: Path, data: bytes) -> None:
    """Make a new file and wait until it is on the disk."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(layout: Layout, path: Path, data: bytes) -> None:
    """Make or replace a file in one step: a reader sees the old or the new, whole."""
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
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot, and need not
            raise
    finally:
        os.close(descriptor)


def discard(layout: Layout, path: Path) -> None:
    """Remove a directory: at once to a reader, by one rename, then file by file."""
    doomed = temporary_path(layout)
    with suppress(FileNotFoundError):  # another process removed it first
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def quarantine(layout: Layout, path: Path, reason: str) -> Path | None:
    """Move what cannot be used out of the way, with the reason beside it; None if that fails."""
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


def temporary_path(layout: Layout) -> Path:
    """A new name that says whose it is, so that what a killed process left can be removed."""
    layout.temporary.mkdir(parents=True, exist_ok=True)
    return layout.temporary / f"{os.uname().nodename}.{os.getpid()}.{os.urandom(6).hex()}"


def is_stale(path: Path, *, now: float) -> bool:
    """Whether a temporary path was left behind: older than a day, or its owner is dead.

    A process in another container can share this host's name but not its numbers, and looks dead;
    ten minutes outlast any single write.
    """
    age = now - path.lstat().st_mtime
    host, _, rest = path.name.rpartition(".")[0].rpartition(".")
    dead = host == os.uname().nodename and rest.isdecimal() and not _is_alive(int(rest))
    return age > 86_400 or (dead and age > 600)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return True
