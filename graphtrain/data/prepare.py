"""Text to indexed datasets: tokenize, split into training and validation, write."""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock

from graphtrain.data import manifest
from graphtrain.data.corpus import Corpus, texts
from graphtrain.data.description import Description, read_description, write_description
from graphtrain.data.encode import Encoded, Encoder, encode_chunks
from graphtrain.data.indexed_writer import IndexedWriter
from graphtrain.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_sentencepiece
from graphtrain.errors import DataError

Report = Callable[[str, float], None]  # what is being done, and the fraction of it that is

_PER_WORKER = 4 << 20  # bytes of text; less is tokenized sooner than a process starts


@dataclass(frozen=True)
class Prepared:
    """What a directory holds after `prepare`."""

    directory: Path
    train: Description
    validation: Description | None
    up_to_date: bool  # nothing was done: it held the same before


def prepare(
    inputs: Sequence[str | Path],
    output: str | Path,
    tokenizer: str,
    *,
    key: str = "text",
    append_eod: bool = True,
    validation: float = 0.05,
    seed: int = 0,
    workers: int | None = None,
    report: Report = lambda stage, fraction: None,
) -> Prepared:
    """Make OUTPUT/train and OUTPUT/validation from JSON lines; the same inputs, the same bytes.

    The tokenizer is `bytes`, a .model file, or `sentencepiece:VOCAB`, which is learned from the
    training documents only. Workers are processes; left out, there are as many as pay. They change
    nothing but the time. Where the directory already holds the result, nothing is done; where
    preparing fails, the directory keeps what it held.

    Raises:
        DataError: an input, the tokenizer or the output cannot be used.
    """
    corpus = Corpus(tuple(map(Path, inputs)), key, validation, seed)
    if not 0 <= validation < 1:
        raise DataError(f"validation = {validation} is not a fraction from 0 to below 1")
    request = manifest.Request.of(corpus, tokenizer, append_eod)
    work = _Work(Path(output), corpus, append_eod, workers, report)
    with work.disk_errors():
        work.directory.mkdir(parents=True, exist_ok=True)
        with FileLock(work.directory / ".lock"):
            up_to_date = manifest.is_up_to_date(work.directory, request)
            if not up_to_date:
                files = work.write(_tokenizer(tokenizer, corpus, report))
                manifest.write_manifest(work.directory, request, files)
            descriptions = [read_description(work.directory / name) for name in work.splits]
    train, held_out = [*descriptions, None][:2]
    assert train is not None
    return Prepared(work.directory, train, held_out, up_to_date)


class _Work:
    """One pass over a corpus into the files of a directory."""

    def __init__(
        self,
        directory: Path,
        corpus: Corpus,
        append_eod: bool,
        workers: int | None,
        report: Report,
    ) -> None:
        self.directory = directory
        self.splits = ("train", "validation") if corpus.validation else ("train",)
        self._corpus = corpus
        self._append_eod = append_eod
        self._workers = workers
        self._report = report
        self._fraction = 0.0  # of the corpus that is tokenized
        self._nbytes = 0  # written for it

    def write(self, tokenizer: Tokenizer) -> list[str]:
        """Write datasets, descriptions and tokenizer; return the names of the files."""
        if self._append_eod and tokenizer.eod is None:
            raise DataError(
                "the tokenizer has no piece for the end of a document; choose another, or --no-eod"
            )
        with contextlib.ExitStack() as stack:
            writers = [
                stack.enter_context(IndexedWriter(self.directory / name, tokenizer.vocab))
                for name in self.splits
            ]
            self._tokenize(tokenizer, writers)
            self._check_sizes(writers)
            for writer in writers:
                writer.complete()
            self._remove_old()
        return self._describe(tokenizer, writers)

    @contextlib.contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Turn errors of the system into one that says what to do."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self.directory.is_dir():
                raise DataError(f"{error.filename}: {error.strerror}") from None
            free = shutil.disk_usage(self.directory).free
            needed = f"about {_size(self._nbytes / self._fraction)}" if self._fraction else "more"
            raise DataError(
                f"{error.filename}: the disk is full after {_size(self._nbytes)} "
                f"({self._fraction:.0%} of the text); {needed} is needed and {_size(free)} is free "
                f"in {self.directory}. Free space there, or choose another --output"
            ) from None

    def _tokenize(self, tokenizer: Tokenizer, writers: list[IndexedWriter]) -> None:
        encoder = Encoder(tokenizer, self._corpus.key, self._append_eod)
        workers = self._workers or _workers_that_pay(self._corpus, tokenizer)
        total = max(self._corpus.nbytes, 1)
        for encoded in encode_chunks(self._corpus.chunks(), encoder, workers):
            self._fraction = min(encoded.chunk.read / total, 1.0)
            held_out = self._corpus.is_validation(encoded.chunk)
            for writer, mask in zip(writers, (~held_out, held_out), strict=False):
                _write_some(writer, encoded, mask)
            self._nbytes = sum(writer.nbytes for writer in writers)
            self._report("tokenizing", self._fraction)

    def _check_sizes(self, writers: list[IndexedWriter]) -> None:
        documents = sum(writer.documents for writer in writers)
        if not documents:
            names = ", ".join(map(str, self._corpus.paths))
            raise DataError(f"{names}: the corpus is empty; give files with some text")
        for name, writer in zip(self.splits, writers, strict=True):
            if writer.token_count < 2:
                raise DataError(
                    f"the {name} split has {writer.token_count} tokens and needs 2: of {documents} "
                    f"documents, --validation {self._corpus.validation} --seed "
                    f"{self._corpus.seed} leaves it {writer.documents}; give more documents or "
                    "another --validation (0 for none)"
                )

    def _remove_old(self) -> None:
        """Remove what describes the files about to be replaced, and a validation set not wanted."""
        manifest.remove_manifest(self.directory)
        for name in ("train.json", "validation.json"):
            (self.directory / name).unlink(missing_ok=True)
        if "validation" not in self.splits:  # it would be part of the new training data
            for name in ("validation.idx", "validation.bin"):
                (self.directory / name).unlink(missing_ok=True)

    def _describe(self, tokenizer: Tokenizer, writers: list[IndexedWriter]) -> list[str]:
        saved = tokenizer.save(self.directory)
        for name, writer in zip(self.splits, writers, strict=True):
            description = Description(
                tokenizer=tokenizer.kind,
                tokenizer_digest=tokenizer.digest,
                tokenizer_file=saved,
                vocab=tokenizer.vocab,
                eod=tokenizer.eod if self._append_eod else None,
                documents=writer.documents,
                tokens=writer.token_count,
            )
            write_description(self.directory / name, description)
        files = [f"{name}.{ending}" for name in self.splits for ending in ("bin", "idx", "json")]
        return [*files, saved] if saved else files


def _tokenizer(spec: str, corpus: Corpus, report: Report) -> Tokenizer:
    kind, _, size = spec.partition(":")
    if kind != "sentencepiece":
        return load_tokenizer(spec)
    if not size.isdecimal():
        raise DataError(f"--tokenizer {spec}: give the number of pieces, as in sentencepiece:32000")
    return train_sentencepiece(_training_texts(corpus, report), int(size))


def _training_texts(corpus: Corpus, report: Report) -> Iterator[str]:
    total = max(corpus.nbytes, 1)
    for chunk in corpus.chunks():
        report("reading for the tokenizer", min(chunk.read / total, 1.0))
        held_out = corpus.is_validation(chunk)
        for text, is_held_out in zip(texts(chunk, corpus.key), held_out, strict=True):
            if not is_held_out:
                yield text
    report("learning the tokenizer", 0.0)


def _write_some(writer: IndexedWriter, encoded: Encoded, mask: np.ndarray) -> None:
    """Write the documents of a chunk that the mask names and that have text."""
    sizes = encoded.sizes[mask]
    writer.extend(encoded.tokens[np.repeat(mask, encoded.sizes)], sizes[sizes > 0])


def _workers_that_pay(corpus: Corpus, tokenizer: Tokenizer) -> int:
    if isinstance(tokenizer, ByteTokenizer):
        return 1  # moving text between processes takes longer than copying its bytes
    processors = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    )
    return max(1, min(processors or 1, corpus.nbytes // _PER_WORKER))


def _size(nbytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"
