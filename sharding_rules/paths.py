"""Paths that users give in settings and options: of local files, and possible ones."""

import re

_URL = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4095  # NAME_MAX of common file systems, PATH_MAX of Linux


def check_local_path(path: str) -> str:
    """Return `path` if it can be the path of a local file or directory.

    Raises:
        ValueError: it is a URL, or no file can have this name; the message says what to change.
    """
    if match := _URL.match(path):
        raise ValueError(
            f"{path[:80]} is a URL ({match[1].lower()}), and here a local path is needed; download "
            "it first, a folder of an object store by graphtrain data pull URL DIRECTORY"
        )
    try:
        name_bytes = [len(name.encode(errors="surrogateescape")) for name in path.split("/")]
    except UnicodeEncodeError:
        raise ValueError("the path is not valid Unicode; no file can have it") from None
    if "\0" in path:
        raise ValueError("the path contains NUL; no file can have it")
    if max(name_bytes) > _MAX_NAME_BYTES or sum(name_bytes) + len(name_bytes) > _MAX_PATH_BYTES:
        raise ValueError(
            f"the path {path[:40]}... is too long; a file name has at most {_MAX_NAME_BYTES} "
            f"bytes, and a path at most {_MAX_PATH_BYTES}"
        )
    return path
