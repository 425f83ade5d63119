"""A store of objects elsewhere: a directory, S3, GCS, Azure, or HTTP to read from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graphtrain.errors import CacheError


class Remote:
    """Objects by name; each appears whole or not at all."""

    def __init__(self, url: str, *, make: bool = True) -> None:
        """Open a store; credentials and endpoints come from the variables of its own tools.

        Args:
            url: a directory, or a URL.
            make: a directory that is not there.

        Raises:
            CacheError: no such kind of store, no such directory, or obstore is not installed.
        """
        self.url = url
        self._store = _open(url, make)

    def names(self, prefix: str) -> Iterator[str]:
        """Names that begin with a directory, as in "v1/requests/".

        Raises:
            CacheError: it cannot be listed, as over HTTP.
        """
        import obstore

        with _errors(self.url, "list", prefix):
            for page in obstore.list(self._store, prefix=prefix.rstrip("/")):
                yield from (one["path"] for one in page)

    def get(self, name: str) -> bytes | None:
        """An object, or None where there is none.

        Raises:
            CacheError: the store does not answer.
        """
        import obstore

        with _errors(self.url, "read", name):
            try:
                return bytes(obstore.get(self._store, name).bytes())
            except FileNotFoundError:
                return None

    def put(self, name: str, data: bytes) -> None:
        """Store an object in place of what was there.

        Raises:
            CacheError: it cannot be written.
        """
        import obstore

        with _errors(self.url, "write", name):
            obstore.put(self._store, name, data)


def _open(url: str, make: bool) -> Any:
    try:
        from obstore.store import LocalStore, from_url
    except ModuleNotFoundError:
        raise CacheError(f"{url}: needs pip install 'graphtrain[share]'") from None
    with _errors(url, "open", ""):
        if "://" not in url:
            path = Path(url).expanduser().absolute()
            if make:
                path.mkdir(parents=True, exist_ok=True)
            elif not path.is_dir():
                raise CacheError(f"{url}: no such directory")
            return LocalStore(path)
        if url.startswith("http://") or url.startswith("https://"):
            return from_url(url, client_options={"allow_http": True})
        return from_url(url)


class _errors:
    """What a store refuses, as an error of the cache."""

    def __init__(self, url: str, verb: str, name: str) -> None:
        self._what = f"cannot {verb} {url.rstrip('/')}/{name}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, CacheError) or not isinstance(error, Exception):
            return
        first = str(error).partition("\n")[0]
        raise CacheError(f"{self._what}: {first}") from error
