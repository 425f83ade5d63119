"""Merging of several datasets into one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.data.indexed.dataset import (
    DTYPES,
    IndexedDataset,
    dataset_paths,
    file_digests,
)
from graphtrain.data.indexed.description import (
    DatasetDescription,
    dataset_tokenizer,
    read_description,
    write_description,
)
from graphtrain.data.indexed.images import images_prefix, images_writer
from graphtrain.data.indexed.loss_spans import loss_spans_prefix, loss_spans_writer
from graphtrain.data.indexed.writer import IndexedWriter
from graphtrain.data.tokenizers.open import load_tokenizer
from graphtrain.data.tokenizers.protocol import CHAT_TEMPLATE
from graphtrain.errors import DataError
from graphtrain.files import atomic_write

_TOKENS = 1 << 22  # tokens copied at a time


def merge(
    prefixes: Sequence[str | Path], output: str | Path, *, replace: bool = False
) -> DatasetDescription | None:
    """Write the documents of several datasets, one after another, into one dataset.

    Memory use does not grow with the datasets. The result has a description if all inputs have
    one. A document of several sequences becomes one sequence.

    Args:
        prefixes: Path prefixes of the datasets.
        output: Path prefix of the result.
        replace: Replace a dataset at `output`, which must not be one of the inputs.

    Raises:
        DataError: a dataset cannot be used, the tokenizers or dtypes differ, or there is a dataset
            at `output`.
    """
    _check_output(prefixes, output, replace)
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    descriptions = [read_description(prefix) for prefix in prefixes]
    _check(datasets, descriptions)
    directory = Path(output).parent
    directory.mkdir(parents=True, exist_ok=True)
    description = descriptions[0] if all(descriptions) else None
    tokenizer = dataset_tokenizer(prefixes[0]) if description else None
    _check_directory(directory, description)
    # Without a known vocabulary, accept every token of the dtype.
    vocab = description.vocab if description else int(np.iinfo(datasets[0].dtype).max) + 1
    with IndexedWriter(output, vocab, dtype=datasets[0].dtype) as writer:
        for dataset in datasets:
            _copy(dataset, writer)
    Path(f"{output}.json").unlink(missing_ok=True)
    conversations = description.conversations if description else None
    images = description.images if description else None
    if conversations is not None:
        with loss_spans_writer(output) as spans_writer:
            for prefix in prefixes:
                _copy(IndexedDataset(loss_spans_prefix(prefix)), spans_writer)
    if images is not None:
        with images_writer(output) as pixels_writer:
            for prefix in prefixes:
                _copy(IndexedDataset(images_prefix(prefix), allow_empty=True), pixels_writer)
    if description is None or tokenizer is None:
        return None
    tokenizer_files = tokenizer.save(directory)
    template = Path(prefixes[0]).parent / CHAT_TEMPLATE
    if conversations is not None and template.is_file():
        with atomic_write(directory / CHAT_TEMPLATE) as file:
            file.write(template.read_bytes())
    merged_description = DatasetDescription(
        tokenizer=description.tokenizer,
        tokenizer_digest=description.tokenizer_digest,
        tokenizer_file=tokenizer_files[0] if tokenizer_files else None,
        vocab=description.vocab,
        bos=description.bos,
        eod=description.eod,
        documents=writer.documents,
        tokens=writer.token_count,
        digests=file_digests(output),
        conversations=conversations and conversations.of(output),
        images=images and images.of(output),
    )
    return write_description(output, merged_description)


def _check_output(prefixes: Sequence[str | Path], output: str | Path, replace: bool) -> None:
    """Refuse to write over an input, and over another dataset unless it is to be replaced."""
    written = {path.resolve() for path in dataset_paths(output)}
    for prefix in prefixes:
        if written & {path.resolve() for path in dataset_paths(prefix)}:
            raise DataError(f"--output {output} is also an input; choose another --output")
    existing = [path for path in dataset_paths(output) if path.exists()]
    if existing and not replace:
        raise DataError(
            f"{existing[0]} exists already; choose another --output, or replace it with --replace"
        )


def _check(
    datasets: Sequence[IndexedDataset], descriptions: Sequence[DatasetDescription | None]
) -> None:
    first = datasets[0]
    for dataset, description in zip(datasets, descriptions, strict=True):
        if dataset.dtype != first.dtype:
            raise DataError(
                f"{dataset.prefix} has tokens of {dataset.dtype} and {first.prefix} of "
                f"{first.dtype}; prepare both with the same tokenizer"
            )
        if dataset.dtype not in (DTYPES[8], DTYPES[4]):
            raise DataError(
                f"{dataset.prefix}: cannot merge tokens of {dataset.dtype}; prepare the dataset "
                "again"
            )
        if _conversation_settings(description) != _conversation_settings(descriptions[0]):
            raise DataError(
                f"{dataset.prefix} and {first.prefix} differ in kind (text, conversations or "
                "preference pairs), chat template or --train-on; train on a blend of them, or "
                "prepare "
                "both with the same settings"
            )
        if _image_settings(description) != _image_settings(descriptions[0]):
            raise DataError(
                f"{dataset.prefix} and {first.prefix} differ in their images: in size, in the "
                "--processor or the version of transformers or Pillow that they were prepared "
                "with, or only one has any; prepare both with the same settings and versions"
            )
        described = [entry for entry in (descriptions[0], description) if entry is not None]
        tokenizers = {(entry.tokenizer_digest, entry.bos, entry.eod) for entry in described}
        if len(tokenizers) > 1:
            raise DataError(
                f"{dataset.prefix} and {first.prefix} were made with different tokenizers or "
                "end-of-document tokens, or only one with a beginning-of-sequence token; prepare "
                "both with the same settings"
            )


def _conversation_settings(description: DatasetDescription | None) -> tuple[str, str, bool] | None:
    """Return the settings that conversations were made with; None for text."""
    conversations = description.conversations if description else None
    return conversations and conversations.made


def _image_settings(description: DatasetDescription | None) -> Any:
    """Return the settings that images were made with; None without images."""
    images = description.images if description else None
    return images and images.made


def _check_directory(directory: Path, description: DatasetDescription | None) -> None:
    """Refuse to replace the tokenizer of other datasets in the same directory."""
    if description is None or description.tokenizer_file is None:
        return
    tokenizer_path = directory / description.tokenizer_file
    if (
        tokenizer_path.is_file()
        and load_tokenizer(tokenizer_path).digest != description.tokenizer_digest
    ):
        raise DataError(
            f"{tokenizer_path}: is a different tokenizer; choose another directory for --output"
        )


def _copy(dataset: IndexedDataset, writer: IndexedWriter) -> None:
    """Append all documents of a dataset, several at a time."""
    offsets = dataset.document_offsets
    first = 0
    while first < len(dataset):
        last = int(np.searchsorted(offsets, offsets[first] + _TOKENS, side="right")) - 1
        last = min(max(last, first + 1), len(dataset))
        sizes = np.diff(offsets[first : last + 1])
        writer.extend(dataset.tokens[offsets[first] : offsets[last]], sizes)
        first = last
