"""Instruction data to indexed datasets: conversations as a template writes them, answers marked."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.data.indexed.description import Conversations
from graphtrain.data.prepare import manifest
from graphtrain.data.prepare.chat_templates import (
    Learn,
    Rendered,
    Template,
    find_template,
    spelled_out,
)
from graphtrain.data.prepare.conversations import read_conversations
from graphtrain.data.prepare.encode import Encode, Encoded
from graphtrain.data.prepare.text import Prepared, Report, Work
from graphtrain.data.readers.corpus import Chunk, Corpus
from graphtrain.data.tokenizers.tokenizer import CHAT_TEMPLATE, Tokenizer, load_tokenizer
from graphtrain.errors import DataError
from graphtrain.files import replacing


@dataclass(frozen=True)
class Instructed(Prepared):
    """What a directory holds after `instruct`."""

    spelled_out: tuple[str, ...] = ()  # marks of the template that the tokenizer has no token for


def instruct(
    inputs: Sequence[str | Path],
    output: str | Path,
    tokenizer: str,
    *,
    template: str = "own",
    format: str = "auto",
    learn: Learn = "answers",
    eod: str | None = None,
    workers: int | None = None,
    report: Report = lambda stage, fraction: None,
    **corpus: Any,
) -> Instructed:
    """Make datasets of conversations, or of pairs of them, as `prepare` makes datasets of texts.

    Beside the tokens of PREFIX are those to learn, in PREFIX_learned. Records without an answer to
    learn are left out. The template is written down beside the tokenizer.

    Args:
        inputs: Files, or folders that `datasets` saved.
        output: The directory.
        tokenizer: One that `load_tokenizer` knows.
        template: As `find_template` takes it.
        format: One of FORMATS, or auto: each record's keys say.
        learn: All answers, the last of each conversation, or everything.
        eod: The token for the end, where it is not the tokenizer's own.
        workers: Processes; left out, as many as pay.
        report: Told what is being done, and the fraction of it that is.
        corpus: What else `Corpus` takes.

    Raises:
        DataError: an input, the tokenizer or the output cannot be used.
    """
    if tokenizer.startswith("sentencepiece:"):
        raise DataError(
            f"--tokenizer {tokenizer}: a tokenizer is learned from text, not from conversations; "
            "give that of the model, or make one with: graphtrain data tokenizer"
        )
    files = Corpus.of(inputs, keys=(), **corpus)
    known = load_tokenizer(tokenizer, eod)
    chosen = find_template(template, known)
    making = Instructions(chosen, format, learn, _are_pairs(files, format))
    if making.pairs and learn == "all":
        raise DataError("--learn all: of a pair of answers, only these are compared; leave it out")
    identity = format, making.conversations.template_digest, learn
    request = manifest.Request.of(files, tokenizer, False, eod, identity)
    made = Work(Path(output), files, making, workers, report).prepared(request, tokenizer)
    return Instructed(**vars(made), spelled_out=tuple(spelled_out(chosen, known)))


@dataclass(frozen=True)
class Instructions:
    """A record is a conversation, or a pair of them, and each becomes one document."""

    template: Template
    format: str
    learn: Learn
    pairs: bool
    append_eod = False  # the template says what ends an answer

    @property
    def documents(self) -> int:
        return 2 if self.pairs else 1

    @property
    def conversations(self) -> Conversations:
        digest = hashlib.sha256(repr((self.template.text, *self.template.special.items())).encode())
        return Conversations(
            template=self.template.name,
            template_digest=digest.hexdigest(),
            learn=self.learn,
            pairs=self.pairs,
        )

    def encoder(self, tokenizer: Tokenizer, corpus: Corpus) -> Encode:
        return ConversationEncoder(tokenizer, corpus, self)

    def save(self, directory: Path) -> tuple[str, ...]:
        """The template, under the name that transformers reads it by."""
        with replacing(directory / CHAT_TEMPLATE) as file:
            file.write(self.template.text.encode())
        return (CHAT_TEMPLATE,)


@dataclass(frozen=True)
class ConversationEncoder:
    """Conversations to tokens, and which of them are learned."""

    tokenizer: Tokenizer
    corpus: Corpus
    making: Instructions

    def __call__(self, chunk: Chunk) -> Encoded:
        rendered = [
            text
            for place, record in self.corpus.objects(chunk)
            for text in self._rendered(record, place)
        ]
        documents, learned = [], []
        placed = self.tokenizer.encode_places([one.text for one in rendered])
        for one, tokens in zip(rendered, placed, strict=True):
            spans = tokens.spans(one.spans)
            documents.append(tokens.tokens if spans else tokens.tokens[:0])
            learned.append(np.array(spans, np.int32).reshape(-1))
        if self.making.pairs:
            _leave_out_halves(documents, learned)
        return Encoded(
            chunk,
            np.concatenate(documents).astype(np.int32),
            np.array(list(map(len, documents))),
            np.concatenate(learned),
            np.array(list(map(len, learned))),
        )

    def _rendered(self, record: Any, place: str) -> list[Rendered]:
        conversations = read_conversations(record, self.making.format, place)
        if len(conversations) != self.making.documents:
            kinds = "a conversation", "a pair of answers"
            here, others = kinds if len(conversations) == 1 else kinds[::-1]
            raise DataError(
                f"{place}: is {here}, and the first record is {others}; prepare them apart"
            )
        render, learn = self.making.template.render, self.making.learn
        return [render(conversation, learn, place) for conversation in conversations]


def _leave_out_halves(documents: list[np.ndarray], learned: list[np.ndarray]) -> None:
    """Of a pair with nothing to learn in one of the two, leave out both."""
    for first in range(0, len(documents), 2):
        pair = first, first + 1
        if not all(len(documents[index]) for index in pair):
            for each, index in chain.from_iterable(((documents, i), (learned, i)) for i in pair):
                each[index] = each[index][:0]


def _are_pairs(corpus: Corpus, format: str) -> bool:
    """Whether the first record is a pair of answers."""
    for chunk in corpus.chunks():
        for place, record in corpus.objects(chunk):
            return len(read_conversations(record, format, place)) == 2
    names = ", ".join(map(str, corpus.paths))
    raise DataError(f"{names}: the corpus is empty; give files with some conversations")
