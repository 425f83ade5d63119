"""Download of a folder from an object store: of a dataset, a Hugging Face model, configurations."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from graphtrain.cache.remote import Consume, ObjectStore
from graphtrain.checkpoints.output_directory import create_directory
from graphtrain.checkpoints.remote_manifest import is_inside
from graphtrain.errors import CacheError

_CONCURRENT_FILES = 4


def download_folder(
    url: str, destination: Path, check: Callable[[Path], None], endpoint: str | None = None
) -> dict[str, int]:
    """Download every object under a URL into a new directory; return their sizes by name.

    The directory appears when all objects are there, with the sizes that the store names, and are
    checked.

    Args:
        url: URL of the folder, or path of a directory.
        destination: Directory to create.
        check: Called with the directory under a temporary name; raises if its files are damaged.
        endpoint: Server of an S3-compatible store; None: that of the environment.

    Raises:
        CacheError: the store cannot be read, has no such objects, or an object has no plain name.
        WeightsError: the directory exists and is not empty, or cannot be written.
    """
    store = ObjectStore(url, create=False, endpoint=endpoint)
    names = sorted(store.names(""))
    if not names:
        raise CacheError(f"{url} contains no objects; check the URL, which is that of a folder")
    if strange := [name for name in names if not is_inside(name)]:
        raise CacheError(f"{url} has an object that no file can be: {strange[0][:100]!r}")
    with create_directory(destination) as directory, ThreadPoolExecutor(_CONCURRENT_FILES) as pool:
        try:
            sizes = list(pool.map(lambda name: _download(store, name, directory / name), names))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        check(directory)
    return dict(zip(names, sizes, strict=True))


def _download(store: ObjectStore, name: str, path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:

        def begin() -> Consume:
            file.seek(0)
            file.truncate()
            return file.write

        store.stream(name, None, begin)
    return path.stat().st_size
