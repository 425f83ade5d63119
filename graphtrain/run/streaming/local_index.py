"""Local copies of what describes a dataset in an object store: all of it but the tokens.

They are in the cache of `run.data.stream`, beside each other as `graphtrain data prepare` writes
them. The description is read from the store at each start, and all other files are those that it
has digests of.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphtrain.cache.remote import Consume, ObjectStore
from graphtrain.config.schema import StreamSettings
from graphtrain.data.indexed.dataset import HEADER
from graphtrain.data.indexed.description import DatasetDescription, read_description
from graphtrain.data.indexed.loss_spans import loss_spans_prefix
from graphtrain.data.tokenizers.huggingface import COMPANION_FILES
from graphtrain.errors import CacheError, DataError
from graphtrain.files import content_digest
from graphtrain.run.streaming.block_files import remove_abandoned
from sharding_rules.documents import MAX_JSON_BYTES

_CLIENT_SECONDS = 20.0  # for which the client of a store repeats a request by itself
_PARTIAL = ".partial-"  # in the name of a file until it is complete
_READ_TIMEOUT = 15.0  # seconds without data after which a request is repeated


def open_store(settings: StreamSettings, url: str) -> ObjectStore:
    """Return the store of the folder of a dataset.

    Raises:
        CacheError: it cannot be opened.
    """
    folder = url.rpartition("/")[0]
    return ObjectStore(
        folder,
        min(_CLIENT_SECONDS, settings.timeout),
        create=False,
        endpoint=settings.endpoint,
        read_timeout=_READ_TIMEOUT,
    )


def remote_description(store: ObjectStore, url: str) -> tuple[bytes, DatasetDescription]:
    """Return the description of a dataset, as bytes and decoded.

    Raises:
        DataError: it does not exist, is damaged, or lacks the digests that streaming needs.
        CacheError: the store cannot be read.
    """
    content = store.get(f"{_name(url)}.json", MAX_JSON_BYTES)
    if content is None:
        raise DataError(
            f"{url}.json: no such object; upload the directory that graphtrain data prepare wrote. "
            "A dataset of Megatron-LM has no digests and cannot be streamed: graphtrain data pull"
        )
    with tempfile.TemporaryDirectory(prefix="graphtrain-description-") as temporary:
        prefix = Path(temporary, _name(url))
        path = prefix.with_name(f"{prefix.name}.json")
        path.write_bytes(content)
        try:
            description = read_description(prefix)
        except DataError as error:
            raise DataError(
                f"{str(error).replace(str(path), f'{url}.json')}, or upload its directory again"
            ) from None
    assert description is not None
    if description.blocks is None or description.digests is None:
        raise DataError(
            f"{url}.json, of an earlier version, has no digests of blocks, so the dataset cannot "
            "be streamed; write it again with graphtrain data merge PREFIX --output NEW, or use "
            "graphtrain data pull"
        )
    if description.images is not None:
        raise DataError(
            f"{url}: has images, which are not streamed; download the dataset with graphtrain data "
            "pull"
        )
    file = description.tokenizer_file
    if file is not None and (Path(file).name != file or file.startswith(".")):
        raise DataError(f"{url}.json: {file[:80]!r} is not the name of a file beside it")
    return content, description


def fetch_index(settings: StreamSettings, url: str) -> DatasetDescription:
    """Fetch what describes a dataset, unless it is here; return its description.

    Raises:
        DataError: a file is missing, or is not the one of the description.
        CacheError: the store cannot be read.
        OSError: the cache cannot be written.
    """
    store, local = open_store(settings, url), Path(settings.local_prefix(url))
    local.parent.mkdir(parents=True, exist_ok=True)
    with _locked(local.parent):
        remove_abandoned(local.parent.glob(f".*{_PARTIAL}*"))
        content, description = remote_description(store, url)
        limits = _limits(description)
        for suffix, digest in _digests(description).items():
            path = Path(f"{local}{suffix}")
            if not path.is_file() or content_digest(path) != digest:
                _fetch(store, url, suffix, digest, path, limits[suffix])
        for name in filter(None, (description.tokenizer_file, *COMPANION_FILES)):
            _fetch_beside(store, local.parent / name)
        _write(Path(f"{local}.json"), content)
    return description


def _digests(description: DatasetDescription) -> dict[str, str]:
    """Return the digests of the index, and of the loss masks, by the end of the file's name."""
    assert description.digests is not None
    found = {".idx": description.digests["idx"]}
    if description.conversations is not None:
        learned = loss_spans_prefix("")
        masks = description.conversations.digests or {}
        found |= {f"{learned}.{ending}": masks[ending] for ending in ("bin", "idx")}
    return found


def _limits(description: DatasetDescription) -> dict[str, int]:
    """Return the largest sizes that these files can have, so that none fills the disk.

    Source: the format of Megatron-LM (`graphtrain.data.indexed.writer`): 12 bytes for each
    sequence, and 8 for each document. A span of the loss mask is two numbers of 4 bytes.
    """
    documents, tokens = description.documents, description.tokens
    learned, ends = loss_spans_prefix(""), HEADER.size + 8 * (documents + 1)
    return {
        ".idx": ends + 12 * max(documents, tokens),
        f"{learned}.idx": ends + 12 * documents,
        f"{learned}.bin": 8 * tokens,
    }


def _fetch(store: ObjectStore, url: str, suffix: str, digest: str, path: Path, limit: int) -> None:
    """Fetch a file, which appears when its digest is the one of the description."""
    partial = _partial_path(path)
    try:
        with partial.open("wb") as file:

            def begin() -> Consume:
                file.seek(0)
                file.truncate()
                return file.write

            store.stream(f"{_name(url)}{suffix}", None, begin, limit)
        if content_digest(partial) != digest:
            raise DataError(
                f"{url}{suffix}: its digest differs from the one in {_name(url)}.json; upload both "
                "again"
            )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _fetch_beside(store: ObjectStore, path: Path) -> None:
    """Fetch a file of the tokenizer, if there is one; whoever reads it checks its digest."""
    content = store.get(path.name, MAX_JSON_BYTES)
    if content is None:
        path.unlink(missing_ok=True)
    elif not path.is_file() or path.read_bytes() != content:
        _write(path, content)


def _partial_path(path: Path) -> Path:
    return path.with_name(f".{path.name}{_PARTIAL}{os.getpid()}")


def _write(path: Path, content: bytes) -> None:
    partial = _partial_path(path)
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Let the processes of a host fetch into a directory one after the other."""
    with (directory / ".lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _name(url: str) -> str:
    return url.rpartition("/")[2]


def changed_dataset(store: ObjectStore, url: str, digests: dict[str, str]) -> str | None:
    """Say that the dataset in the store is another one now; None if it is not, or is unknown."""
    try:
        _, description = remote_description(store, url)
    except (CacheError, DataError):
        return None
    if description.digests == digests:
        return None
    return (
        f"{url} was replaced by another dataset while it was read; restore it, or start a run of "
        "the new one in another run.directory"
    )
