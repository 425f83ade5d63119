"""Paths and URLs that users give in settings and options: of local files, stores and servers."""

import re
from urllib.parse import urlsplit

_URL = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
# The beginning of a URL without its second slash: a directory with this name is not meant.
_SHORT_URL = re.compile(r"(s3a?|gs|az|abfss?|obs|oss|https?):/?(?!/)", re.IGNORECASE)
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
    check_url_slashes(path)
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


def check_url_slashes(url: str) -> None:
    """Check that a path is not the URL of a store whose two slashes are incomplete.

    Raises:
        ValueError: it is; it would be taken for a directory with the name s3:.
    """
    if match := _SHORT_URL.match(url):
        rest = url[match.end() :]
        raise ValueError(
            f"{url[:80]} is no URL of a store, which has two slashes; write "
            f"{match[1].lower()}://{rest[:80]}"
        )


def check_endpoint(endpoint: str) -> str:
    """Return `endpoint` if it can be the URL of a server.

    Raises:
        ValueError: it cannot; the message says what to write.
    """
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port beyond 65535, an address without its bracket
        is_url = False
    if not is_url or not re.fullmatch(r"[!#-;=?-\[\]_a-z~]+", endpoint):
        raise ValueError(
            f'"{endpoint[:80]}" is not the URL of a server; write http://HOST:PORT or https://HOST'
        )
    return endpoint
