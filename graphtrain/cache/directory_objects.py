"""Files of a directory that serves as an object store."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from graphtrain.cache.store_errors import UnusableObject
from graphtrain.errors import CacheError


def list_files(root: Path, prefix: str) -> Iterator[str]:
    """Yield the names of files; obstore would end at a link that leads nowhere.

    Args:
        root: The directory.
        prefix: Folder in it.

    Raises:
        CacheError: a folder cannot be listed.
    """
    directory = root / prefix

    def stop(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise CacheError(f"cannot list {directory}: {error.strerror}") from error

    for folder, _, names in os.walk(directory, onerror=stop):
        for name in names:
            yield Path(folder, name).relative_to(root).as_posix()


def refuse_special_file(path: Path) -> None:
    """Refuse a named pipe or device, at which reading could wait for ever.

    Raises:
        UnusableObject: it is one.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # missing or unreadable, as obstore will report
    if not stat.S_ISREG(mode):
        raise UnusableObject(f"{path} is not a regular file")
