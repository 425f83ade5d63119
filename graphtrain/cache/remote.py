"""Remote object stores: a directory, S3, GCS, Azure, or read-only HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from graphtrain.cache.directory_objects import list_files, refuse_special_file
from graphtrain.cache.store_client import check_place, open_client
from graphtrain.cache.store_errors import (
    RetryLimit,
    TransientStoreError,
    UnusableObject,
    store_errors,
)
from graphtrain.errors import CacheError

_T = TypeVar("_T")

RETRY_SECONDS = 120.0  # seconds; below the five minutes for which a signed request is valid
_READ_TIMEOUT = 60.0  # seconds without data after which a request is repeated
_PART_BYTES = 8 << 20  # of an upload in parts, and of what is read at once
_CONCURRENT_PARTS = 4  # of one file
_NOT_PARTIAL = "non-partial response"  # what obstore says of a server that ignores ranges
Consume = Callable[[bytes], object]  # called with each part of an object


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
        check_place(url, endpoint)
        self.url = url
        self._is_web = url.startswith(("http://", "https://"))
        self._patience = retry_seconds if "://" in url else 0.0  # retrying a local disk is useless
        self._directory = None if "://" in url else Path(url).expanduser().absolute()
        self._store = open_client(url, retry_seconds, create, endpoint, read_timeout)

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
        last, patience = None, RetryLimit(self._patience)
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
        patience = RetryLimit(self._patience)
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
        patience = RetryLimit(self._patience)
        while True:
            try:
                return read()
            except TransientStoreError as error:
                patience.wait_or_raise(error)

    def _read_range(self, name: str, start: int, length: int, size: int) -> bytes:
        import obstore

        label = f"{self.url.rstrip('/')}/{name}"
        with store_errors(self.url, "read", name):
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

        if self._directory is not None:
            refuse_special_file(self._directory / name)
        label = f"{self.url.rstrip('/')}/{name}"
        with store_errors(self.url, "read", name):
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
            with store_errors(self.url, "read", name):
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

        patience = RetryLimit(self._patience)
        parts: Any = {"chunk_size": _PART_BYTES, "max_concurrency": _CONCURRENT_PARTS}
        while True:
            try:
                with store_errors(self.url, "write", name):
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

        patience = RetryLimit(self._patience)
        while True:  # the client does not repeat the request of a deletion
            try:
                with store_errors(self.url, "delete", name), suppress(FileNotFoundError):
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
            yield from list_files(self._directory, prefix)
            return
        with store_errors(self.url, "list", prefix):
            for page in obstore.list(self._store, prefix=prefix.rstrip("/"), offset=after):
                yield from (one["path"] for one in page)

    def _get(self, name: str, limit: int) -> bytes | None:
        import obstore

        if self._directory is not None:
            refuse_special_file(self._directory / name)
        with store_errors(self.url, "read", name, one_object=self._directory is not None):
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
