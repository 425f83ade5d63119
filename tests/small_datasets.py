"""Small datasets as fixtures, made anew for each call so that property tests may ask for many."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from graphtrain.data.indexed.writer import IndexedWriter

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
