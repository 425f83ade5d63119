"""Remote object stores: a directory, S3, GCS, Azure, or read-only HTTP."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from graphtrain.errors import CacheError
from lowering.machine.extras import optional_import
from sharding_rules.paths import check_endpoint, check_url_slashes

_T = TypeVar("_T")

RETRY_SECONDS = 120.0  # seconds; below the five minutes for which a signed request is valid
_MAX_RETRIES, _RETRY_DELAY_SECONDS = (
    20,
    0.1,
)  # retries of interrupted responses, and seconds between them
_MAX_ERROR_LENGTH = 600  # characters of an error message; S3 sends XML, web servers entire pages
_READ_TIMEOUT = 60.0  # seconds without data after which a request is repeated
_PART_BYTES = 8 << 20  # of an upload in parts, and of what is read at once
_CONCURRENT_PARTS = 4  # of one file
_NOT_PARTIAL = "non-partial response"  # what obstore says of a server that ignores ranges
Consume = Callable[[bytes], object]  # called with each part of an object
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


class UnusableObject(CacheError):
    """One object of a store cannot be used; others may."""


class ObjectStore:
    """Object store; each object is written atomically."""

    def __init__(
        self,
        url: str,
        retry_seconds: float = RETRY_SECONDS,
        *,
        create: bool = True,
        endpoint: str | None = None,
        read_timeout: float = _READ_TIMEOUT,
    ) -> None:
        """Open a store; credentials and endpoints come from its usual environment variables.

        Args:
            url: path of a directory, or a URL.
            retry_seconds: seconds for which failed requests are retried.
            create: create the directory if it does not exist.
            endpoint: URL of a server with the interface of the store, in place of that of the
                environment.
            read_timeout: seconds without data after which a request is repeated.

        Raises:
            CacheError: unsupported URL, no bucket in it, no such directory, or obstore is not
                installed.
        """
        _check_place(url, endpoint)
        self.url = url
        self._is_web = url.startswith(("http://", "https://"))
        self._patience = retry_seconds if "://" in url else 0.0  # retrying a local disk is useless
        self._directory = None if "://" in url else Path(url).expanduser().absolute()
        self._store = _open(url, retry_seconds, create, endpoint, read_timeout)

    @property
    def is_directory(self) -> bool:
        """Return whether the store is a directory, which is read without a network."""
        return self._directory is not None

    def names(self, prefix: str) -> Iterator[str]:
        """Yield the names of all objects under a directory such as "v1/requests/".

        Raises:
            CacheError: the store cannot be listed; HTTP never can.
        """
        if self._is_web:
            raise CacheError(
                f"cannot list {self.url}: HTTP has no listing; name the configurations"
            )
        last, patience = None, _RetryLimit(self._patience)
        while True:
            try:
                for name in self._list(prefix, after=last):
                    last = name
                    patience.reset()
                    yield name
                return
            except TransientStoreError as error:
                patience.wait_or_raise(error)

    def get(self, name: str, limit: int) -> bytes | None:
        """Return an object's contents, or None if it does not exist.

        Args:
            name: name of the object.
            limit: maximum size in bytes; checked before the contents are read.

        Raises:
            UnusableObject: the object is larger than `limit`, or is a special file.
            CacheError: the object cannot be read.
        """
        return self._retried(lambda: self._get(name, limit))

    def stream(
        self, name: str, size: int | None, begin: Callable[[], Consume], limit: int | None = None
    ) -> None:
        """Read a large object in parts, from its beginning again where reading breaks off.

        Args:
            name: name of the object.
            size: size that it should have; None: that which the store names.
            begin: called at each beginning; returns what is called with each part.
            limit: maximum size in bytes; checked before the contents are read.

        Raises:
            UnusableObject: the object does not exist, has another size, or is too large.
            CacheError: the object cannot be read.
        """
        patience = _RetryLimit(self._patience)
        while True:
            try:
                consume = begin()
                for part in self._parts(name, size, limit):
                    patience.extend(self._patience)
                    consume(part)
                return
            except TransientStoreError as error:
                patience.wait_or_raise(error)

    def read_range(self, name: str, start: int, length: int, size: int) -> bytes:
        """Return a part of an object.

        Args:
            name: name of the object.
            start: first byte.
            length: number of bytes.
            size: size that the whole object should have.

        Raises:
            UnusableObject: the object does not exist, or has another size.
            CacheError: the object cannot be read.
        """
        return self._retried(lambda: self._read_range(name, start, length, size))

    def _retried(self, read: Callable[[], _T]) -> _T:
        """Return what a call reads, which is repeated while the store fails for a time."""
        patience = _RetryLimit(self._patience)
        while True:
            try:
                return read()
            except TransientStoreError as error:
                patience.wait_or_raise(error)

    def _read_range(self, name: str, start: int, length: int, size: int) -> bytes:
        import obstore

        label = f"{self.url.rstrip('/')}/{name}"
        with _store_errors(self.url, "read", name):
            try:
                found = obstore.get(self._store, name, options={"range": (start, start + length)})
                part = bytes(found.bytes()) if found.meta["size"] == size else None
            except FileNotFoundError:
                raise UnusableObject(f"{label} is missing") from None
            except Exception as error:
                if _NOT_PARTIAL in str(error):
                    raise CacheError(
                        f"{self.url} has no requests for a part of an object; download the whole "
                        "folder with graphtrain data pull"
                    ) from error
                raise
        if part is None:
            raise UnusableObject(f"{label} has {found.meta['size']} bytes instead of {size}")
        if len(part) != length:
            raise TransientStoreError(
                f"cannot read {label}: it ended {length - len(part)} bytes early"
            )
        return part

    def _parts(self, name: str, size: int | None, limit: int | None) -> Iterator[bytes]:
        import obstore

        self._refuse_special_file(name)
        label = f"{self.url.rstrip('/')}/{name}"
        with _store_errors(self.url, "read", name):
            try:
                found = obstore.get(self._store, name)
            except FileNotFoundError:
                raise UnusableObject(f"{label} is missing") from None
            if size is not None and found.meta["size"] != size:
                raise UnusableObject(f"{label} has {found.meta['size']} bytes instead of {size}")
            self._check_size(name, found.meta["size"], limit)
            parts = iter(found.stream(min_chunk_size=_PART_BYTES))
        left = found.meta["size"]
        while True:
            with _store_errors(self.url, "read", name):
                part = next(parts, None)
            if part is None:
                break
            left -= len(part)
            yield bytes(part)
        if left:
            raise TransientStoreError(f"cannot read {label}: it ended {left} bytes early")

    def put_file(self, name: str, path: Path) -> None:
        """Create or replace an object with the content of a file, in parts if it is large.

        Raises:
            CacheError: the object cannot be written.
        """
        self._put(name, path)

    def _put(self, name: str, content: Path | bytes) -> None:
        """Write an object; again where an answer was lost.

        The client repeats the last request of an upload in parts, which the store may have carried
        out: then it answers that there is no such upload.
        """
        import obstore

        patience = _RetryLimit(self._patience)
        parts: Any = {"chunk_size": _PART_BYTES, "max_concurrency": _CONCURRENT_PARTS}
        while True:
            try:
                with _store_errors(self.url, "write", name):
                    obstore.put(self._store, name, content, **parts)
                return
            except CacheError as error:
                is_lost = isinstance(error.__cause__, FileNotFoundError)
                if not (is_lost and self._patience) and not isinstance(error, TransientStoreError):
                    raise
                patience.wait_or_raise(error)

    def delete(self, name: str) -> None:
        """Delete an object; do nothing if it does not exist.

        Raises:
            CacheError: the object cannot be deleted.
        """
        import obstore

        patience = _RetryLimit(self._patience)
        while True:  # the client does not repeat the request of a deletion
            try:
                with _store_errors(self.url, "delete", name), suppress(FileNotFoundError):
                    obstore.delete(self._store, name)
                return
            except TransientStoreError as error:
                patience.wait_or_raise(error)

    def put(self, name: str, data: bytes) -> None:
        """Create or replace an object.

        Raises:
            CacheError: the object cannot be written.
        """
        self._put(name, data)

    def _list(self, prefix: str, after: str | None) -> Iterator[str]:
        import obstore

        if self._directory is not None:
            yield from self._list_directory(self._directory / prefix)
            return
        with _store_errors(self.url, "list", prefix):
            for page in obstore.list(self._store, prefix=prefix.rstrip("/"), offset=after):
                yield from (one["path"] for one in page)

    def _list_directory(self, directory: Path) -> Iterator[str]:
        """Yield the names of files; obstore would end at a link that leads nowhere."""

        def stop(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise CacheError(f"cannot list {directory}: {error.strerror}") from error

        for folder, _, names in os.walk(directory, onerror=stop):
            for name in names:
                yield Path(folder, name).relative_to(self._directory or "").as_posix()

    def _get(self, name: str, limit: int) -> bytes | None:
        import obstore

        self._refuse_special_file(name)
        with _store_errors(self.url, "read", name, one_object=self._directory is not None):
            try:
                found = obstore.get(self._store, name)
            except FileNotFoundError:
                return None
            self._check_size(name, found.meta["size"], limit)
            return bytes(found.bytes())

    def _check_size(self, name: str, size: int, limit: int | None) -> None:
        if limit is not None and size > limit:
            raise UnusableObject(
                f"{self.url.rstrip('/')}/{name} has {size} bytes, more than the {limit} that "
                "it may have; it was not read"
            )

    def _refuse_special_file(self, name: str) -> None:
        """Refuse a named pipe or device in a directory, at which reading could wait for ever.

        Raises:
            UnusableObject: it is one.
        """
        if self._directory is None:
            return
        try:
            mode = os.stat(self._directory / name).st_mode
        except OSError:
            return  # missing or unreadable, as obstore will report
        if not stat.S_ISREG(mode):
            raise UnusableObject(f"{self._directory / name} is not a regular file")


def _open(url: str, patience: float, make: bool, endpoint: str | None, read_timeout: float) -> Any:
    with optional_import(url):
        from obstore.store import LocalStore, from_url
    with _store_errors(url, "open", ""):
        if "://" not in url:
            path = Path(url).expanduser().absolute()
            if make:
                path.mkdir(parents=True, exist_ok=True)
            elif not path.is_dir():
                raise CacheError(f"{url}: no such directory")
            return LocalStore(path)
        if endpoint and url.startswith("gs://"):
            raise CacheError(
                f"{url} has no endpoint of its own; write s3://{url.removeprefix('gs://')} "
                "for one with the interface of S3, as https://storage.googleapis.com has"
            )
        named: Any = {"endpoint": endpoint} if endpoint else None
        return from_url(
            url,
            config=named,
            client_options=_client(url, endpoint, read_timeout),
            retry_config=_retries(patience),
        )


def _check_place(url: str, endpoint: str | None) -> None:
    """Check a URL and the server behind it, with which obstore would crash.

    Raises:
        CacheError: the URL names no bucket, or one of both is no URL.
    """
    if url.endswith("://"):
        raise CacheError(f"{url} names no bucket; write {url}BUCKET/PATH")
    try:
        check_url_slashes(url)
    except ValueError as error:
        raise CacheError(str(error)) from None
    servers = {"endpoint": endpoint or ""}
    if url.startswith("s3"):
        servers |= {name: os.environ.get(name, "") for name in _ENDPOINTS}
    for name, server in servers.items():
        try:
            check_endpoint(server or "https://default")
        except ValueError as error:
            raise CacheError(f"{url}: {name} = {error}") from None


def _client(url: str, endpoint: str | None, read_timeout: float) -> Any:
    """Return client options: one hour per transfer, and a limit of the time without data."""
    endpoints = [endpoint or "", url, *(os.environ.get(name, "") for name in _ENDPOINTS)]
    return {
        "allow_http": any(endpoint.startswith("http://") for endpoint in endpoints),
        "read_timeout": timedelta(seconds=read_timeout),
        "timeout": timedelta(hours=1),
    }


def _retries(patience: float) -> Any:
    """Return retry options: limit the time, not the count, for stores that often fail."""
    return {
        "max_retries": 10_000,
        "retry_timeout": timedelta(seconds=patience),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5)},
    }


class _RetryLimit:
    """Retry limit for responses that break off; obstore retries only before a response begins.

    The error of an interrupted listing equals that of a refused one, so the number of retries is
    limited as well as the time.
    """

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._tries = 0

    def reset(self) -> None:
        """Reset the number of retries after progress."""
        self._tries = 0

    def extend(self, seconds: float) -> None:
        """Allow so many seconds from now, after progress; the number of retries stays."""
        self._until = time.monotonic() + seconds

    def wait_or_raise(self, error: Exception) -> None:
        """Wait before the next attempt, or raise the error if the limit is reached."""
        self._tries += 1
        if self._tries > _MAX_RETRIES or time.monotonic() > self._until:
            raise error
        time.sleep(_RETRY_DELAY_SECONDS)


class TransientStoreError(CacheError):
    """A failure of the store that may be transient."""


class _store_errors:
    """Context manager that converts errors of obstore into CacheError.

    With `one_object`, they concern only that object: UnusableObject.
    """

    def __init__(self, url: str, verb: str, name: str, *, one_object: bool = False) -> None:
        self._what = f"cannot {verb} {url.rstrip('/')}/{name}"
        self._one_object = one_object

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, CacheError) or not isinstance(error, Exception):
            return
        message = " ".join(str(error).partition("\n\nDebug source")[0].split())[:_MAX_ERROR_LENGTH]
        is_transient = (
            type(error).__name__ == "GenericError"
        )  # by name, because obstore may not be installed
        other_error = TransientStoreError if is_transient else CacheError
        raise (UnusableObject if self._one_object else other_error)(
            f"{self._what}: {message}"
        ) from error
