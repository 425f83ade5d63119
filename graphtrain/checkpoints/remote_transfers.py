"""Transfers of the files of checkpoints: several at once, each with its SHA-256 digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from graphtrain.cache.remote import Consume, ObjectStore
from graphtrain.cache.store_errors import UnusableObject
from graphtrain.checkpoints.remote_manifest import DamagedRemoteCheckpoint, RemoteFile
from graphtrain.files import content_digest

T = TypeVar("T")
R = TypeVar("R")
_CONCURRENT_FILES = 4


def put_file(store: ObjectStore, prefix: str, name: str, path: Path) -> RemoteFile:
    """Upload a file to a name below a prefix; return its size and digest.

    Raises:
        CacheError: the object cannot be written.
    """
    file = RemoteFile(path.stat().st_size, content_digest(path))
    store.put_file(f"{prefix}/{name}", path)
    return file


def download_files(
    store: ObjectStore,
    step: int,
    prefix: str,
    files: Mapping[str, RemoteFile],
    directory: Path,
    progress: Callable[[], None],
) -> None:
    """Download and verify files below a prefix into a directory.

    Args:
        store: The store.
        step: Step of their checkpoint, for messages.
        prefix: Prefix of the names of the objects.
        files: Size and digest of each file by its name.
        directory: Directory, which is created.
        progress: Called after each part, in any thread.

    Raises:
        DamagedRemoteCheckpoint: an object is missing, or not as it was uploaded.
        CacheError: the store cannot be read.
    """

    def fetch(name: str, file: RemoteFile) -> None:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as target:

            def use(part: bytes) -> None:
                target.write(part)
                progress()

            def begin() -> Consume:
                target.seek(0)
                target.truncate()
                return use

            read_verified(store, step, f"{prefix}/{name}", file, begin)

    directory.mkdir(parents=True, exist_ok=True)
    in_parallel(fetch, files)


def read_verified(
    store: ObjectStore, step: int, name: str, file: RemoteFile, begin: Callable[[], Consume]
) -> None:
    """Read an object and verify it; `begin` as of `ObjectStore.stream`.

    Raises:
        DamagedRemoteCheckpoint: it is missing, or not as it was uploaded.
        CacheError: the store cannot be read.
    """
    digest = hashlib.sha256()

    def begin_digest() -> Consume:
        nonlocal digest
        digest, use = hashlib.sha256(), begin()

        def consume(part: bytes) -> None:
            digest.update(part)
            use(part)

        return consume

    try:
        store.stream(name, file.size, begin_digest)
    except UnusableObject as error:
        raise DamagedRemoteCheckpoint(store.url, step, str(error)) from error
    if digest.hexdigest() != file.sha256:
        raise DamagedRemoteCheckpoint(
            store.url, step, f"{name} does not have the digest it was uploaded with"
        )


def in_parallel(action: Callable[[str, T], R], items: Mapping[str, T]) -> dict[str, R]:
    """Return the result of an action for each item; the first error cancels those not started."""
    with ThreadPoolExecutor(_CONCURRENT_FILES) as pool:
        futures = {name: pool.submit(action, name, item) for name, item in items.items()}
        try:
            return {name: future.result() for name, future in futures.items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
