"""Opening of the datasets of a run that are in an object store."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path

from graphtrain.config.schema import Data, StreamSettings, is_streamed
from graphtrain.data.batches.rows import Streams
from graphtrain.data.indexed.dataset import read_header
from graphtrain.errors import DataError
from graphtrain.run.streaming.block_files import BlockFiles, in_memory_blocks, remove_replaced
from graphtrain.run.streaming.local_index import changed_dataset, fetch_index, open_store
from graphtrain.run.streaming.streamed_blocks import StreamedBlocks

_MEGABYTE = 1 << 20


def streamed_datasets(data: Data) -> list[str]:
    """Return the URLs of the datasets that are in an object store, each once."""
    return [prefix for prefix in data.datasets if is_streamed(prefix)]


def open_streams(data: Data) -> Streams:
    """Return the blocks of the streamed datasets, by the path prefixes of their local files.

    Each dataset is opened once in a process: by the checks, the loader and every evaluation.

    Raises:
        DataError: a dataset is missing or damaged.
        CacheError: a store cannot be read.
    """
    return {
        data.stream.local_prefix(url): _open(data.stream, url) for url in streamed_datasets(data)
    }


def described_datasets(data: Data) -> list[str]:
    """Return the path prefixes of the training datasets, for commands that read no tokens.

    What describes a streamed dataset is fetched if it is not in the cache.

    Raises:
        DataError, CacheError: as for `open_streams`.
    """
    prefixes = []
    for dataset in data.train_datasets:
        one = data.only(dataset)
        prefixes += one.local.train_datasets
        if is_streamed(dataset) and not Path(f"{prefixes[-1]}.json").is_file():
            open_streams(one)
    return prefixes


@lru_cache(maxsize=64)
def _open(settings: StreamSettings, url: str) -> StreamedBlocks:
    prefix = Path(settings.local_prefix(url))
    try:
        description = fetch_index(settings, url)
    except OSError as error:
        raise DataError(
            f"{error.filename or prefix}: {error.strerror}; {url} needs a cache for its index: set "
            "run.data.stream.cache to a directory of a disk with enough space"
        ) from error
    assert description.blocks is not None and description.digests is not None
    try:
        digests, block_bytes = description.blocks.decode(), description.blocks.block_bytes
    except ValueError as error:
        raise DataError(f"{url}.json: {error}; upload it again") from None
    size = description.tokens * read_header(Path(f"{prefix}.idx"))[0].itemsize
    if len(digests) != -(-size // block_bytes):
        raise DataError(f"{url}.json: has digests of another number of blocks; upload it again")
    blocks = max(1, settings.cache_mb * _MEGABYTE // block_bytes)
    directory = prefix.parent / f"{prefix.name}.blocks" / description.digests["bin"][:16]
    remove_replaced(directory)
    store = open_store(settings, url)
    return StreamedBlocks(
        store,
        f"{prefix.name}.bin",
        size=size,
        block_bytes=block_bytes,
        digests=digests,
        files=BlockFiles(directory, digests, blocks, in_memory_blocks(block_bytes)),
        most_ahead=max(1, min(blocks // 2, in_memory_blocks(block_bytes))),
        timeout=settings.timeout,
        changed=partial(changed_dataset, store, url, description.digests),
    )
