"""Conversion of instruction data: conversations into indexed datasets with a loss mask."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.data.indexed.description import ConversationSettings
from graphtrain.data.prepare import manifest
from graphtrain.data.prepare.chat_templates import (
    Rendered,
    Template,
    TrainOn,
    find_template,
    split_special_tokens,
)
from graphtrain.data.prepare.conversations import read_conversations
from graphtrain.data.prepare.encode import ChunkEncoder, EncodedChunk, begins_with
from graphtrain.data.prepare.text import Preparation, PrepareResult, ProgressCallback
from graphtrain.data.readers.corpus import Chunk, Corpus
from graphtrain.data.tokenizers.open import load_tokenizer
from graphtrain.data.tokenizers.protocol import CHAT_TEMPLATE, Tokenizer
from graphtrain.data.tokenizers.special_tokens import document_prefix
from graphtrain.errors import DataError
from graphtrain.files import atomic_write


@dataclass(frozen=True)
class InstructResult(PrepareResult):
    """Result of `instruct`: the datasets in a directory."""

    spelled_out: tuple[str, ...] = ()  # special tokens of the template that the tokenizer lacks
    missing_bos: bool = False  # documents lack the BOS that the tokenizer puts before a text


def instruct(
    inputs: Sequence[str | Path],
    output: str | Path,
    tokenizer: str,
    *,
    template: str = "own",
    format: str = "auto",
    train_on: TrainOn = "answers",
    bos: bool | None = None,
    eod: str | None = None,
    replace: bool = False,
    workers: int | None = None,
    ray: str | None = None,
    report: ProgressCallback = lambda stage, fraction: None,
    **corpus: Any,
) -> InstructResult:
    """Make datasets of conversations or of preference pairs, as `prepare` does of texts.

    The loss mask of the dataset PREFIX is stored in PREFIX_learned. Records without an answer to
    train on are left out. The chat template is saved next to the tokenizer.

    Args:
        inputs: Files, or folders written by `datasets.Dataset.save_to_disk`.
        output: Output directory.
        tokenizer: A name that `load_tokenizer` accepts.
        template: A name that `find_template` accepts.
        format: One of FORMATS, or auto to detect the format of each record by its keys.
        train_on: Train on all answers, on the last of each conversation, or on every token.
        bos: Begin every document with the beginning-of-sequence token, once. None: if the template
            writes it, as apply_chat_template of transformers.
        eod: Text of the end-of-document token. None: the tokenizer's own.
        replace: Replace a dataset that was made from another request.
        workers: Worker processes. None: chosen by the size of the text and the number of cores.
        ray: Address of a Ray cluster whose machines tokenize; see `prepare`.
        report: Called with the current stage and its completed fraction.
        corpus: Other fields of `Corpus`.

    Raises:
        DataError: an input, the tokenizer or the output cannot be used.
    """
    if tokenizer == "chars" or tokenizer.startswith("sentencepiece:"):
        raise DataError(
            f"--tokenizer {tokenizer}: a tokenizer cannot be trained on conversations; give the "
            "tokenizer of the model, or train one with: graphtrain data tokenizer"
        )
    files = Corpus.from_inputs(inputs, keys=(), **corpus)
    loaded_tokenizer = load_tokenizer(tokenizer, eod)
    chat_template = find_template(template, loaded_tokenizer)
    encoder = InstructionEncoder(
        chat_template, format, train_on, _is_preference_corpus(files, format), bos
    )
    encoder.prefix(loaded_tokenizer)  # raises if --bos is given and there is no such token
    if encoder.pairs and train_on == "all":
        raise DataError(
            "--train-on all does not apply to preference pairs, where only the answers are "
            "compared; "
            "omit --train-on"
        )
    identity = format, encoder.conversations.template_digest, train_on
    request = manifest.PrepareRequest.from_corpus(files, tokenizer, bos, False, eod, identity)
    preparation = Preparation(Path(output), files, encoder, workers, report, replace, ray)
    result = preparation.run(request, tokenizer)
    return InstructResult(
        **vars(result),
        spelled_out=tuple(split_special_tokens(chat_template, loaded_tokenizer)),
        missing_bos=bos is None and bool(loaded_tokenizer.prefix) and not result.train.bos,
    )


@dataclass(frozen=True)
class InstructionEncoder:
    """Conversations or preference pairs: each conversation becomes one document."""

    template: Template
    format: str
    train_on: TrainOn
    pairs: bool
    bos: bool | None = None  # None: as the template
    append_eod = False  # the template ends the answers
    images = None

    def prefix(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the tokenizer's BOS, whether or not the template or --bos writes it."""
        has_bos = bool(tokenizer.prefix) or tokenizer.bos is not None
        return document_prefix(tokenizer, True if has_bos or self.bos else None)

    @property
    def documents(self) -> int:
        return 2 if self.pairs else 1

    @property
    def conversations(self) -> ConversationSettings:
        digest = hashlib.sha256(repr((self.template.text, *self.template.special.items())).encode())
        return ConversationSettings(
            template=self.template.name,
            template_digest=digest.hexdigest(),
            train_on=self.train_on,
            pairs=self.pairs,
        )

    def encoder(self, tokenizer: Tokenizer, corpus: Corpus) -> ChunkEncoder:
        return ConversationEncoder(tokenizer, corpus, self)

    def save(self, directory: Path) -> tuple[str, ...]:
        """Write the template, under the file name that transformers reads."""
        with atomic_write(directory / CHAT_TEMPLATE) as file:
            file.write(self.template.text.encode())
        return (CHAT_TEMPLATE,)


@dataclass(frozen=True)
class ConversationEncoder:
    """Encoder of conversations into tokens and a loss mask."""

    tokenizer: Tokenizer
    corpus: Corpus
    making: InstructionEncoder

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        rendered = [
            text
            for location, record in self.corpus.records(chunk)
            for text in self._rendered(record, location)
        ]
        documents, learned = [], []
        encoded = self.tokenizer.encode_with_offsets([document.text for document in rendered])
        for document, tokens in zip(rendered, encoded, strict=True):
            spans = np.array(tokens.spans(document.spans), np.int32).reshape(-1)
            with_bos, spans = begin_document(tokens.tokens, spans, self.making, self.tokenizer)
            documents.append(with_bos if len(spans) else with_bos[:0])
            learned.append(spans)
        if self.making.pairs:
            _drop_incomplete_pairs(documents, learned)
        return EncodedChunk(
            chunk,
            np.concatenate(documents).astype(np.int32),
            np.array(list(map(len, documents))),
            np.concatenate(learned),
            np.array(list(map(len, learned))),
        )

    def _rendered(self, record: Any, location: str) -> list[Rendered]:
        conversations = read_conversations(record, self.making.format, location)
        if len(conversations) != self.making.documents:
            kinds = "a conversation", "a preference pair"
            actual_kind, expected_kind = kinds if len(conversations) == 1 else kinds[::-1]
            raise DataError(
                f"{location}: is {actual_kind}, but the first record is {expected_kind}; "
                "prepare them separately"
            )
        render, train_on = self.making.template.render, self.making.train_on
        return [render(conversation, train_on, location) for conversation in conversations]


def begin_document(
    tokens: np.ndarray, spans: np.ndarray, making: InstructionEncoder, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Add or remove BOS before the text of the template, as --bos and --no-bos ask.

    Args:
        tokens: Tokens of the text.
        spans: Begin and end of the spans to train on.
        making: Says what is asked.
        tokenizer: Has the BOS.

    Returns:
        The tokens and the spans.
    """
    bos, prefix = making.bos, making.prefix(tokenizer)
    if bos is None or not prefix or begins_with(tokens, prefix) == bos:
        return tokens, spans
    if bos:
        return np.concatenate([np.array(prefix, np.int32), tokens]), spans + len(prefix)
    return tokens[len(prefix) :], np.maximum(spans - len(prefix), 0)


def _drop_incomplete_pairs(documents: list[np.ndarray], learned: list[np.ndarray]) -> None:
    """Empty both documents of a pair if one of them has nothing to train on."""
    for first in range(0, len(documents), 2):
        pair = first, first + 1
        if not all(len(documents[index]) for index in pair):
            for arrays, index in chain.from_iterable(((documents, i), (learned, i)) for i in pair):
                arrays[index] = arrays[index][:0]


def _is_preference_corpus(corpus: Corpus, format: str) -> bool:
    """Return True if the first record is a preference pair."""
    for chunk in corpus.chunks():
        for location, record in corpus.records(chunk):
            return len(read_conversations(record, format, location)) == 2
    names = ", ".join(map(str, corpus.paths))
    raise DataError(f"{names}: the corpus is empty; give files that contain conversations")
