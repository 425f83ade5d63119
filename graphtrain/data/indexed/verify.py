"""Whether a dataset is what it says it is, to the last byte."""

from pathlib import Path

import numpy as np

from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.data.indexed.description import (
    Description,
    dataset_tokenizer,
    file_digests,
    read_description,
)
from graphtrain.data.indexed.loss_spans import Learned, learned_prefix
from graphtrain.errors import DataError

_CHUNK = 1 << 22  # tokens looked at a time


def verify(prefix: str | Path, vocab: int | None = None) -> dict[str, int]:
    """Read every token of a dataset; return the numbers of documents and of tokens.

    The index has to agree with itself and with the .bin; all tokens have to be in the vocabulary,
    which is that of the description unless it is given. What a description says besides is checked
    too: sizes, digests, the tokenizer's file and the token at the end of each document.

    Raises:
        DataError: something is wrong; names the file and the place.
    """
    dataset = IndexedDataset(prefix)
    description = read_description(prefix)
    limit = vocab or (description.vocab if description else None)
    _check_tokens(dataset, limit)
    if description is not None:
        _check_description(dataset, description)
        dataset_tokenizer(prefix)
    return {"documents": len(dataset), "tokens": len(dataset.tokens)}


def _check_tokens(dataset: IndexedDataset, vocab: int | None) -> None:
    for first in range(0, len(dataset.tokens), _CHUNK):
        tokens = dataset.tokens[first : first + _CHUNK]
        wrong = tokens < 0 if vocab is None else (tokens < 0) | (tokens >= vocab)
        if wrong.any():
            place = first + int(np.argmax(wrong))
            document = int(np.searchsorted(dataset.document_offsets, place, side="right")) - 1
            limit = f"a vocabulary of {vocab}" if vocab else "any vocabulary"
            raise DataError(
                f"{dataset.prefix}.bin: byte {place * dataset.dtype.itemsize}: document {document} "
                f"holds token {dataset.tokens[place]}, which is outside {limit}"
            )


def _check_description(dataset: IndexedDataset, description: Description) -> None:
    prefix = dataset.prefix
    for name, found in (("documents", len(dataset)), ("tokens", len(dataset.tokens))):
        if (said := getattr(description, name)) != found:
            raise DataError(f"{prefix}.json: says {said} {name}, but there are {found}")
    if description.eod is not None:
        _check_ends(dataset, description.eod)
    _check_digests(prefix, prefix, description.digests)
    if (conversations := description.conversations) is not None:
        Learned(dataset).check(dataset)
        _check_digests(prefix, learned_prefix(prefix), conversations.digests)
        if conversations.pairs and len(dataset) % 2:
            raise DataError(f"{prefix}.json: says pairs, but there are {len(dataset)} documents")


def _check_digests(prefix: str, files: str, digests: dict[str, str] | None) -> None:
    if digests is None:
        return
    for ending, digest in file_digests(files).items():
        if digests.get(ending) != digest:
            raise DataError(
                f"{files}.{ending}: its bytes are not those that {Path(prefix).name}.json was "
                "written for; prepare the dataset again"
            )


def _check_ends(dataset: IndexedDataset, eod: int) -> None:
    begins, ends = dataset.document_offsets[:-1], dataset.document_offsets[1:]
    full = np.flatnonzero(ends > begins)
    wrong = dataset.tokens[ends[full] - 1] != eod
    if wrong.any():
        document = int(full[np.argmax(wrong)])
        last = int(ends[document]) - 1
        raise DataError(
            f"{dataset.prefix}.bin: byte {last * dataset.dtype.itemsize}: document {document} ends "
            f"with token {dataset.tokens[last]}, not with {eod}"
        )
