"""Small datasets as fixtures, made anew for each call so that property tests may ask for many."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from graphtrain.data.indexed.dataset import file_digests
from graphtrain.data.indexed.description import (
    ConversationSettings,
    DatasetDescription,
    write_description,
)
from graphtrain.data.indexed.images import ImageSettings, images_writer
from graphtrain.data.indexed.loss_spans import loss_spans_writer
from graphtrain.data.indexed.writer import IndexedWriter
from graphtrain.data.tokenizers.byte import ByteTokenizer

MakeDataset = Callable[[Sequence[Sequence[int]], int], str]
MakeCorpus = Callable[[Sequence[object]], Path]


@pytest.fixture(scope="session")
def make_dataset(tmp_path_factory: pytest.TempPathFactory) -> MakeDataset:
    """Write documents of token numbers with a vocabulary; return the prefix."""

    def make(documents: Sequence[Sequence[int]], vocab: int) -> str:
        prefix = tmp_path_factory.mktemp("dataset") / "train"
        with IndexedWriter(prefix, vocab) as writer:
            for document in documents:
                writer.append(np.array(document, np.int64))
        return str(prefix)

    return make


@pytest.fixture(scope="session")
def make_corpus(tmp_path_factory: pytest.TempPathFactory) -> MakeCorpus:
    """Write values as JSON lines; a string is the text of a document."""

    def make(documents: Sequence[object]) -> Path:
        path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
        values = [{"text": value} if isinstance(value, str) else value for value in documents]
        path.write_text("".join(json.dumps(value) + "\n" for value in values))
        return path

    return make


def write_image_dataset(
    prefix: Path,
    documents: Sequence[tuple[Sequence[int], np.ndarray]],
    *,
    token: int = 255,
    tokens: int = 4,
    size: tuple[int, int] = (2, 4),
) -> Path:
    """Write documents of bytes with images, (images, height, width, 3); the last token is learned.

    Args:
        prefix: Path prefix of the dataset.
        documents: Tokens and images of each document.
        token: Id of the placeholder.
        tokens: Placeholders of each image.
        size: Height and width of an image.
    """
    with (
        IndexedWriter(prefix, 257) as writer,
        loss_spans_writer(prefix) as spans,
        images_writer(prefix) as pixels,
    ):
        for document, images in documents:
            writer.append(np.array(document))
            spans.append(np.array([len(document) - 1, len(document)]))
            pixels.append(images.reshape(-1))
    conversations = ConversationSettings(
        template="own", template_digest="1", train_on="answers", pairs=False
    )
    images = ImageSettings(
        height=size[0], width=size[1], token=token, tokens=tokens, processor_digest="2"
    )
    description = DatasetDescription(
        tokenizer="bytes",
        tokenizer_digest=ByteTokenizer().digest,
        tokenizer_file=None,
        vocab=257,
        eod=None,
        documents=writer.documents,
        tokens=writer.token_count,
        digests=file_digests(prefix),
        conversations=conversations.of(prefix),
        images=images.of(prefix),
    )
    write_description(prefix, description)
    return prefix
