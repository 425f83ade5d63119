"""Preview of a dataset: documents with their loss mask, and how full packed rows are."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from graphtrain.data.batches.row_images import RowImages
from graphtrain.data.batches.rows import PackingSettings
from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.data.indexed.description import dataset_tokenizer, read_description
from graphtrain.data.indexed.loss_spans import LossSpans
from graphtrain.data.tokenizers.protocol import Tokenizer
from graphtrain.errors import DataError


class MaskedText(NamedTuple):
    """Consecutive tokens of a document that are all inside or all outside the loss mask."""

    text: str
    tokens: np.ndarray
    learned: bool


def masked_documents(prefix: str, first: int, count: int) -> Iterator[tuple[int, list[MaskedText]]]:
    """Yield document indices and their pieces; in plain text, every token is in the loss mask.

    Raises:
        DataError: the dataset cannot be used, or has no such document.
    """
    dataset, description = IndexedDataset(prefix), read_description(prefix)
    tokenizer = dataset_tokenizer(prefix)
    if description is None or tokenizer is None:
        raise DataError(f"{prefix}.json: no such file; it is needed to decode the tokens to text")
    if first >= len(dataset):
        raise DataError(f"{prefix}: has documents 0 to {len(dataset) - 1}, but no document {first}")
    learned = LossSpans(dataset) if description.conversations else None
    for document in range(first, min(first + count, len(dataset))):
        tokens = dataset.document(document)
        mask = learned.mask(document, len(tokens)) if learned else np.ones(len(tokens), bool)
        ends = [0, *np.flatnonzero(np.diff(mask)) + 1, len(tokens)]
        yield (
            document,
            [
                MaskedText(
                    _text(tokenizer, tokens[start:end]), tokens[start:end], bool(mask[start])
                )
                for start, end in pairwise(ends)
                if end > start
            ],
        )


def packing_report(prefix: str, length: int) -> str:
    """Return a report of the rows that best-fit packing needs, and of how full they are."""
    sizes = np.diff(IndexedDataset(prefix).document_offsets)
    description = read_description(prefix)
    images = description.images if description else None
    if images:  # no document with images is cut
        sizes = sizes[sizes <= length + 1]
    packed = PackingSettings(
        length=length,
        length_name="--length",
        isolate_documents=True,
        packing="best_fit",
        overlong="drop" if images else "truncate",
        images=images and RowImages.of(images.most, images),
    ).open(prefix)
    used_positions = int(np.minimum(sizes[sizes > 1] - 1, length).sum())
    share = used_positions / (len(packed) * packed.rows_per_index * length)
    return f"length {length}: {len(packed) * packed.rows_per_index} rows, {share:.1%} full"


def _text(tokenizer: Tokenizer, tokens: np.ndarray) -> str:
    """Decode tokens; also show the end token, which some tokenizers omit from decoded text."""
    end = tokenizer.special.get("eos_token", "")
    text = tokenizer.decode(tokens)
    ends = len(tokens) and tokens[-1] == tokenizer.eod and not text.endswith(end)
    return text + end if ends else text
