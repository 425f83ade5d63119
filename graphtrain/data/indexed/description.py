"""Description of a dataset, PREFIX.json: its tokenizer, sizes and digests."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from graphtrain.data.indexed.blocks import BlockDigests, sample_digests
from graphtrain.data.indexed.dataset import IndexedDataset, dataset_paths, file_digests
from graphtrain.data.indexed.images import ImageSettings, images_prefix
from graphtrain.data.indexed.loss_spans import LossSpans, loss_spans_prefix
from graphtrain.data.indexed.token_range import largest_token
from graphtrain.data.tokenizers.open import load_tokenizer
from graphtrain.data.tokenizers.protocol import Tokenizer
from graphtrain.errors import DataError
from graphtrain.files import (
    atomic_write,
    content_digest,
    json_digest,
    read_digested_object,
    validate,
)

_SUMMARY_TOKENS = 256  # tokens of the first document shown in a summary


@dataclass(frozen=True, kw_only=True)
class ConversationSettings:
    """Settings that a dataset of conversations was made with, and the size of its loss mask."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    template: str  # name
    template_digest: str
    train_on: str  # answers, last or all
    pairs: bool  # documents 2i and 2i + 1 are the chosen and the rejected one of a pair
    learned: int = 0  # tokens in the loss mask
    digests: dict[str, str] | None = None  # of the loss mask's .bin and .idx, by suffix

    def of(self, prefix: str | Path) -> "ConversationSettings":
        """Return a copy with the token count and digests of the written dataset."""
        learned = LossSpans(IndexedDataset(prefix)).count()
        return replace(self, learned=learned, digests=file_digests(loss_spans_prefix(prefix)))

    @property
    def made(self) -> tuple[str, str, bool]:
        """Properties that must be equal in datasets that are merged."""
        return self.template_digest, self.train_on, self.pairs


@dataclass(frozen=True, kw_only=True)
class DatasetDescription:
    """Tokenizer, size and digests of a dataset."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    tokenizer: str  # kind, for example sentencepiece
    tokenizer_digest: str
    tokenizer_file: str | None  # file name in the directory of the dataset
    vocab: int
    eod: int | None  # id of the token that ends every document; None: there is none
    documents: int
    tokens: int
    bos: tuple[int, ...] = ()  # ids that begin every document: BOS; empty: there are none
    digests: dict[str, str] | None = None  # of the .bin and the .idx, by suffix
    conversations: ConversationSettings | None = None  # None: plain text
    largest: int | None = None  # largest token id; None: written by an earlier version
    samples: dict[str, list[str]] | None = (
        None  # of blocks, by suffix; graphtrain.data.indexed.blocks
    )
    blocks: BlockDigests | None = None  # of the .bin; None: written by an earlier version
    images: ImageSettings | None = None  # None: the documents have no images


def write_description(prefix: str | Path, description: DatasetDescription) -> DatasetDescription:
    """Write the description of a dataset, PREFIX.json; return it with what is read off its files.

    The file also contains a digest of the description itself.
    """
    paths = list(dataset_paths(prefix))
    if description.conversations is not None:
        paths += dataset_paths(loss_spans_prefix(prefix))
    if description.images is not None:
        paths += dataset_paths(images_prefix(prefix))
    description = replace(
        description,
        largest=largest_token(prefix),
        samples=sample_digests(prefix, paths),
        blocks=BlockDigests.of(paths[0]),
    )
    fields = asdict(description)
    fields["digest"] = json_digest(fields)
    with atomic_write(Path(f"{prefix}.json")) as file:
        file.write((json.dumps(fields, indent=2) + "\n").encode())
    return description


def read_description(prefix: str | Path) -> DatasetDescription | None:
    """Read the description of a dataset; None if it has none, as for datasets from Megatron.

    Raises:
        DataError: the file is not a description, or is damaged.
    """
    path = Path(f"{prefix}.json")
    try:
        return validate(DatasetDescription, read_digested_object(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: not the description of a dataset ({error}); prepare the dataset again"
        ) from None


def without_prefix(dataset: IndexedDataset, prefix: tuple[int, ...]) -> np.ndarray:
    """Return the indices of the documents that are not empty and do not begin with these ids."""
    starts, sizes = dataset.document_offsets[:-1], np.diff(dataset.document_offsets)
    mismatched = np.zeros(len(starts), bool)
    for index, token in enumerate(prefix):
        mismatched[sizes == index] = True
        long = np.flatnonzero(sizes > index)
        mismatched[long] |= dataset.tokens[starts[long] + index] != token
    return np.flatnonzero(mismatched & (sizes > 0))


def all_begin_with(dataset: IndexedDataset, prefix: tuple[int, ...]) -> bool:
    """Return True if all documents of a dataset begin with these token ids."""
    return not len(without_prefix(dataset, prefix))


def dataset_tokenizer(prefix: str | Path) -> Tokenizer | None:
    """Load the tokenizer that a dataset was made with; None if it has no description.

    Raises:
        DataError: the tokenizer's file is missing, or is not the one the dataset was made with.
    """
    description = read_description(prefix)
    if description is None:
        return None
    file = description.tokenizer_file
    tokenizer = load_tokenizer(Path(prefix).parent / file if file else description.tokenizer)
    if tokenizer.digest != description.tokenizer_digest:
        raise DataError(
            f"{Path(prefix).parent / str(file)}: not the tokenizer that {prefix} was made with; "
            "prepare the dataset again"
        )
    return tokenizer


def check_tokenizer_file(prefix: str | Path, description: DatasetDescription) -> None:
    """Check that the tokenizer's file is the one that a dataset was prepared with.

    Raises:
        DataError: it is another, or damaged.
    """
    path = Path(prefix).parent / (description.tokenizer_file or "")
    if path.is_file() and content_digest(path) != description.tokenizer_digest:
        raise DataError(
            f"{path}: its digest differs from the one in {Path(prefix).name}.json; it is damaged, "
            "or not the tokenizer of the dataset; restore it, or prepare the dataset again"
        )


def summary(prefix: str | Path) -> dict[str, int | str | bool | None]:
    """Summarize a dataset for display; the text is None if the tokenizer is unknown.

    Raises:
        DataError: the dataset or its description cannot be used.
    """
    dataset = IndexedDataset(prefix)
    description = read_description(prefix)
    tokenizer = dataset_tokenizer(prefix)
    first_tokens = dataset.document(0)[:_SUMMARY_TOKENS].tolist()
    conversations = description.conversations if description else None
    return {
        "documents": len(dataset),
        "tokens": len(dataset.tokens),
        "dtype": dataset.dtype.name,
        "tokenizer": description.tokenizer if description else None,
        "vocab": description.vocab if description else None,
        "bos": ", ".join(map(str, description.bos)) or None if description else None,
        "eod": description.eod if description else None,
        "longest": int(np.diff(dataset.document_offsets).max()),
        **(_conversation_summary(conversations) if conversations else {}),
        **(_image_summary(description.images) if description and description.images else {}),
        "text": tokenizer.decode(first_tokens) if tokenizer else None,
    }


def _conversation_summary(
    conversations: ConversationSettings,
) -> dict[str, int | str | bool | None]:
    return {
        "template": conversations.template,
        "train_on": conversations.train_on,
        "learned tokens": conversations.learned,
        "pairs": conversations.pairs,
    }


def _image_summary(images: ImageSettings) -> dict[str, int | str | bool | None]:
    return {
        "images": images.count,
        "image size": f"{images.height} x {images.width}",
        "tokens of an image": images.tokens,
        "most images of a document": images.most,
    }
