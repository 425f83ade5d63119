"""A store of objects elsewhere: a directory, S3, GCS, Azure, or HTTP to read from."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from graphtrain.errors import CacheError

PATIENCE = 120.0  # seconds; less than the five minutes for which a signed request is valid
_TRIES, _PAUSE = 20, 0.1  # of and between answers that break off; seconds
_LONGEST = 600  # characters of an error; S3 tells the reason in XML, web servers whole pages
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


class Remote:
    """Objects by name; each appears whole or not at all."""

    def __init__(self, url: str, patience: float = PATIENCE, *, make: bool = True) -> None:
        """Open a store; credentials and endpoints come from the variables of its own tools.

        Args:
            url: a directory, or a URL.
            patience: seconds for which a request that fails is tried again.
            make: a directory that is not there.

        Raises:
            CacheError: no such kind of store, no such directory, or obstore is not installed.
        """
        self.url = url
        self._is_web = url.startswith(("http://", "https://"))
        self._patience = patience if "://" in url else 0.0  # a disk's answer is final
        self._store = _open(url, patience, make)

    def names(self, prefix: str) -> Iterator[str]:
        """Names that begin with a directory, as in "v1/requests/".

        Raises:
            CacheError: it cannot be listed, as over HTTP.
        """
        if self._is_web:
            raise CacheError(f"cannot list {self.url}, a web server; name the configurations")
        last, patience = None, _Patience(self._patience)
        while True:
            try:
                for name in self._list(prefix, after=last):
                    last = name
                    patience.renew()
                    yield name
                return
            except _Broken as error:
                patience.wait(error)

    def get(self, name: str) -> bytes | None:
        """An object, or None where there is none.

        Raises:
            CacheError: the store does not answer.
        """
        patience = _Patience(self._patience)
        while True:
            try:
                return self._get(name)
            except _Broken as error:
                patience.wait(error)

    def put(self, name: str, data: bytes) -> None:
        """Store an object in place of what was there.

        Raises:
            CacheError: it cannot be written.
        """
        import obstore

        with _errors(self.url, "write", name):
            obstore.put(self._store, name, data)

    def _list(self, prefix: str, after: str | None) -> Iterator[str]:
        import obstore

        with _errors(self.url, "list", prefix):
            for page in obstore.list(self._store, prefix=prefix.rstrip("/"), offset=after):
                yield from (one["path"] for one in page)

    def _get(self, name: str) -> bytes | None:
        import obstore

        with _errors(self.url, "read", name):
            try:
                return bytes(obstore.get(self._store, name).bytes())
            except FileNotFoundError:
                return None


def _open(url: str, patience: float, make: bool) -> Any:
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
        return from_url(url, client_options=_client(url), retry_config=_retries(patience))


def _client(url: str) -> Any:
    """A payload may take an hour, but not a minute without a byte of it."""
    endpoints = [url, *(os.environ.get(name, "") for name in _ENDPOINTS)]
    return {
        "allow_http": any(endpoint.startswith("http://") for endpoint in endpoints),
        "read_timeout": timedelta(minutes=1),
        "timeout": timedelta(hours=1),
    }


def _retries(patience: float) -> Any:
    """Seconds count, not tries: of a store that fails half of them, ten in a row happen."""
    return {
        "max_retries": 10_000,
        "retry_timeout": timedelta(seconds=patience),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5)},
    }


class _Patience:
    """How often to ask once more where an answer broke off: obstore does so only where none came.

    Errors do not tell a list that broke off from a list that is refused, so tries are few as well.
    """

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._tries = 0

    def renew(self) -> None:
        """Something came."""
        self._tries = 0

    def wait(self, error: Exception) -> None:
        """Wait before another try, or raise the error."""
        self._tries += 1
        if self._tries > _TRIES or time.monotonic() > self._until:
            raise error
        time.sleep(_PAUSE)


class _Broken(CacheError):
    """The store failed in a way that may pass."""


class _errors:
    """What a store refuses, as an error of the cache."""

    def __init__(self, url: str, verb: str, name: str) -> None:
        self._what = f"cannot {verb} {url.rstrip('/')}/{name}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, CacheError) or not isinstance(error, Exception):
            return
        said = " ".join(str(error).partition("\n\nDebug source")[0].split())[:_LONGEST]
        broken = type(error).__name__ == "GenericError"  # of obstore, which need not be installed
        raise (_Broken if broken else CacheError)(f"{self._what}: {said}") from error
