"""Complete verification of a dataset against its index and description."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from graphtrain.data.indexed.blocks import damaged_block
from graphtrain.data.indexed.dataset import IndexedDataset, dataset_paths
from graphtrain.data.indexed.description import (
    DatasetDescription,
    dataset_tokenizer,
    read_description,
    without_prefix,
)
from graphtrain.data.indexed.images import ImageFiles, images_prefix
from graphtrain.data.indexed.loss_spans import LossSpans, loss_spans_prefix
from graphtrain.errors import DataError

_CHUNK = 1 << 22  # tokens checked at a time
_BLOCK = 1 << 20  # bytes hashed at a time


def verify(prefix: str | Path, vocab: int | None = None) -> dict[str, int]:
    """Verify a dataset by reading all of it; return the counts of documents and tokens.

    Checks that the index is consistent and agrees with the .bin, and that all tokens are in the
    vocabulary. If the dataset has a description, also checks its sizes, digests, tokenizer file,
    the beginning-of-sequence and end-of-document tokens of each document, and its images.

    Args:
        prefix: Path prefix of the dataset.
        vocab: Vocabulary size. None: that of the description, if there is one.

    Raises:
        DataError: a check failed; names the file and the byte or document.
    """
    dataset = IndexedDataset(prefix)
    description = read_description(prefix)
    limit = vocab or (description.vocab if description else None)
    _check_tokens(dataset, limit)
    if description is not None:
        _check_description(dataset, description)
        if problem := digest_problem(prefix):
            raise DataError(problem)
        dataset_tokenizer(prefix)
    return {"documents": len(dataset), "tokens": len(dataset.tokens)}


def damage(prefix: str | Path) -> str | None:
    """Say which file of a prepared dataset is not as it was written, without a remedy; or None.

    Raises:
        OSError: a file cannot be read.
    """
    try:
        problem = digest_problem(prefix)
        dataset_tokenizer(prefix)
    except DataError as error:
        problem = str(error)
    return problem and problem.partition("; ")[0]


def unverified(prefix: str | Path, vocab: int | None = None) -> str | None:
    """Say what of a dataset cannot be verified because its description is missing, or None.

    Args:
        prefix: Path prefix of the dataset.
        vocab: Vocabulary size that its tokens are checked against, if it is known.

    Raises:
        DataError: the description is damaged.
    """
    description = read_description(prefix)
    if description is None:
        missing = "digests" if vocab else "digests and vocabulary"
        return f"{prefix}.json is missing: {missing} were not checked"
    if description.digests is None:
        return f"{prefix}.json, of an earlier version, has no digests: they were not checked"
    return None


def verify_sample(prefix: str | Path) -> None:
    """Verify sizes, and the digests of some blocks, against the description if there is one.

    Takes milliseconds, however large the dataset. Other blocks are chosen each time.

    Raises:
        DataError: the dataset is not the one that was described; names the file.
    """
    description = read_description(prefix)
    if description is None or description.samples is None:
        return
    try:
        damaged = damaged_block(prefix, description.samples)
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}; prepare the dataset again") from None
    if damaged is not None:
        path, offset = damaged
        raise DataError(
            f"{path}: the block at byte {offset} differs from its digest in "
            f"{Path(prefix).name}.json; restore the file, or prepare the dataset again"
        )


def digest_problem(
    prefix: str | Path, is_stopping: Callable[[], bool] = lambda: False
) -> str | None:
    """Compare the files of a dataset with their digests; return what is wrong, or None.

    Args:
        prefix: Path prefix of the dataset.
        is_stopping: Called for every block that is read; if true, the rest is not verified.

    Raises:
        DataError: the description is damaged.
        OSError: a file cannot be read.
    """
    description = read_description(prefix)
    if description is None:
        return None
    recorded = {str(prefix): description.digests}
    if description.conversations is not None:
        recorded[loss_spans_prefix(prefix)] = description.conversations.digests
    if description.images is not None:
        recorded[images_prefix(prefix)] = description.images.digests
    for files, digests in recorded.items():
        if digests is None:
            continue
        for path in dataset_paths(files):
            digest = _digest(path, is_stopping)
            if digest is not None and digest != digests.get(path.suffix[1:]):
                return (
                    f"{path}: its digest differs from the one in {Path(prefix).name}.json; "
                    "restore the file, or prepare the dataset again"
                )
    return None


def _digest(path: Path, is_stopping: Callable[[], bool]) -> str | None:
    """Return the SHA-256 of a file; None if it was stopped."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            if is_stopping():
                return None
            digest.update(block)
    return digest.hexdigest()


def _check_tokens(dataset: IndexedDataset, vocab: int | None) -> None:
    for chunk_start in range(0, len(dataset.tokens), _CHUNK):
        tokens = dataset.tokens[chunk_start : chunk_start + _CHUNK]
        invalid = tokens < 0 if vocab is None else (tokens < 0) | (tokens >= vocab)
        if invalid.any():
            position = chunk_start + int(np.argmax(invalid))
            document = int(np.searchsorted(dataset.document_offsets, position, side="right")) - 1
            limit = f"a vocabulary of {vocab}" if vocab else "any vocabulary"
            raise DataError(
                f"{dataset.prefix}.bin: byte {position * dataset.dtype.itemsize}: "
                f"document {document} contains token {dataset.tokens[position]}, which "
                f"is outside {limit}"
            )


def _check_description(dataset: IndexedDataset, description: DatasetDescription) -> None:
    prefix = dataset.prefix
    for name, actual in (("documents", len(dataset)), ("tokens", len(dataset.tokens))):
        if (recorded := getattr(description, name)) != actual:
            raise DataError(
                f"{prefix}.json: records {recorded} {name}, but the dataset has {actual}"
            )
    if len(mismatched := without_prefix(dataset, description.bos)):
        document = int(mismatched[0])
        first = int(dataset.document_offsets[document])
        raise DataError(
            f"{prefix}.bin: byte {first * dataset.dtype.itemsize}: document {document} begins "
            f"with token {dataset.tokens[first]}, not with the beginning-of-sequence token "
            f"{', '.join(map(str, description.bos))}"
        )
    if description.eod is not None:
        _check_ends(dataset, description.eod)
    if description.images is not None:
        ImageFiles(dataset, description.images).check(dataset)
    if (conversations := description.conversations) is not None:
        LossSpans(dataset).check(dataset)
        if conversations.pairs and len(dataset) % 2:
            raise DataError(
                f"{prefix}.json: records preference pairs, but the dataset has an odd number of "
                f"documents, {len(dataset)}"
            )


def _check_ends(dataset: IndexedDataset, eod: int) -> None:
    starts, ends = dataset.document_offsets[:-1], dataset.document_offsets[1:]
    full = np.flatnonzero(ends > starts)
    mismatched = dataset.tokens[ends[full] - 1] != eod
    if mismatched.any():
        document = int(full[np.argmax(mismatched)])
        last = int(ends[document]) - 1
        raise DataError(
            f"{dataset.prefix}.bin: byte {last * dataset.dtype.itemsize}: document {document} ends "
            f"with token {dataset.tokens[last]}, not with the end-of-document token {eod}"
        )
