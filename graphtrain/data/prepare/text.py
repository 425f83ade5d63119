"""Text to indexed datasets: tokenize, split into training, validation and test, write."""

import contextlib
import errno
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from filelock import FileLock

from graphtrain.data.indexed.description import Conversations, Description, read_description
from graphtrain.data.prepare import manifest
from graphtrain.data.prepare.encode import Encode, Encoder, encode_chunks
from graphtrain.data.prepare.progress import Progress, read_progress, unfinished, write_progress
from graphtrain.data.prepare.splits import Splits, are_there, split_names
from graphtrain.data.readers.corpus import TRAIN, Corpus
from graphtrain.data.readers.records import TextDocument
from graphtrain.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from graphtrain.data.tokenizers.train_sentencepiece import train_sentencepiece
from graphtrain.errors import DataError
from lowering.machine import host

Report = Callable[[str, float], None]  # what is being done, and the fraction of it that is

_PER_WORKER = 4 << 20  # bytes of text; less is tokenized sooner than a process starts


@dataclass(frozen=True)
class Prepared:
    """What a directory holds after `prepare`."""

    directory: Path
    train: Description
    validation: Description | None
    test: Description | None
    up_to_date: bool  # nothing was done: it held the same before
    left_out: int = 0  # records of which nothing was written


def prepare(
    inputs: Sequence[str | Path],
    output: str | Path,
    tokenizer: str,
    *,
    keys: Sequence[str] = ("text",),
    clean: Sequence[str] = (),
    text_document: TextDocument = "paragraph",
    append_eod: bool = True,
    eod: str | None = None,
    validation: float = 0.05,
    test: float = 0.0,
    seed: int = 0,
    workers: int | None = None,
    report: Report = lambda stage, fraction: None,
) -> Prepared:
    """Make OUTPUT/train, validation and test from files of text; the same inputs, the same bytes.

    The tokenizer is one that `load_tokenizer` knows, or `sentencepiece:VOCAB`, which is learned
    from the training documents only. Workers are processes; left out, there are as many as pay.
    They change nothing but the time. Where the directory already holds the result, nothing is done;
    where preparing fails, the directory keeps what it held; where it was killed, the next call goes
    on from what is on the disk.

    Raises:
        DataError: an input, the tokenizer or the output cannot be used.
    """
    corpus = Corpus.of(
        inputs,
        keys=tuple(keys),
        clean=tuple(clean),
        text_document=text_document,
        validation=validation,
        test=test,
        seed=seed,
    )
    request = manifest.Request.of(corpus, tokenizer, append_eod, eod)
    work = Work(Path(output), corpus, Texts(append_eod), workers, report)
    return work.prepared(request, tokenizer)


class Making(Protocol):
    """What becomes of a record."""

    @property
    def documents(self) -> int:
        """Of each record."""
        ...

    @property
    def append_eod(self) -> bool:
        """Whether every document ends with the tokenizer's token for that."""
        ...

    @property
    def conversations(self) -> Conversations | None:
        """Of a dataset that says what is learned of it."""
        ...

    def encoder(self, tokenizer: Tokenizer, corpus: Corpus) -> Encode: ...

    def save(self, directory: Path) -> tuple[str, ...]:
        """Write what belongs beside the tokenizer; return the names of the files."""
        ...


@dataclass(frozen=True)
class Texts:
    """A record is a text, and becomes one document."""

    append_eod: bool
    documents = 1
    conversations = None

    def encoder(self, tokenizer: Tokenizer, corpus: Corpus) -> Encode:
        if self.append_eod and tokenizer.eod is None:
            raise DataError(
                "the tokenizer has no token for the end of a document; name one with --eod-token, "
                "choose another tokenizer, or --no-eod"
            )
        return Encoder(tokenizer, corpus, self.append_eod)

    def save(self, directory: Path) -> tuple[str, ...]:
        return ()


class Work:
    """One pass over a corpus into the files of a directory."""

    def __init__(
        self,
        directory: Path,
        corpus: Corpus,
        making: Making,
        workers: int | None,
        report: Report,
    ) -> None:
        self.directory = directory
        self._corpus = corpus
        self._making = making
        self._left_out = 0
        self._workers = workers
        self._report = report
        self._fraction = 0.0  # of the corpus that is tokenized
        self._nbytes = 0  # written for it

    def prepared(self, request: manifest.Request, spec: str) -> Prepared:
        """What the directory holds after the pass, or held before, if that is the same.

        Raises:
            DataError: an input, the tokenizer or the output cannot be used.
        """
        with self._disk_errors():
            self.directory.mkdir(parents=True, exist_ok=True)
            with FileLock(self.directory / ".lock"):
                up_to_date = manifest.is_up_to_date(self.directory, request)
                if not up_to_date:
                    files = self._write(request, spec)
                    manifest.write_manifest(self.directory, request, files)
                names = split_names(self._corpus)
                found = {name: read_description(self.directory / name) for name in names}
        train = found["train"]
        assert train is not None
        held_out = found.get("validation"), found.get("test")
        return Prepared(self.directory, train, *held_out, up_to_date, self._left_out)

    def _write(self, request: manifest.Request, spec: str) -> list[str]:
        """Write datasets, descriptions and tokenizer; return the names of the files."""
        tokenizer, progress = self._beginning(request, spec)
        encoder, about = self._making.encoder(tokenizer, self._corpus), self._making.conversations
        with Splits(self.directory, self._corpus, tokenizer, progress, about is not None) as splits:
            records = self._tokenize(tokenizer, encoder, splits, progress)
            self._left_out = records - splits.documents // self._making.documents
            splits.complete()
        self._report("writing", 1.0)
        files = splits.describe(self._making.append_eod, about)
        return [*files, *self._making.save(self.directory)]

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
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

    def _beginning(self, request: manifest.Request, spec: str) -> tuple[Tokenizer, Progress]:
        """The tokenizer, and how far an interrupted preparation of the same request came."""
        asked = asdict(request)
        progress = read_progress(self.directory, asked)
        if progress is not None:
            try:
                tokenizer = load_tokenizer(progress.tokenizer, request.eod)
            except DataError:  # its folder was moved since; what was asked for is still there
                pass
            else:
                if are_there(self.directory, tokenizer.vocab, progress.written or {}):
                    return tokenizer, progress
        kind, _, size = spec.partition(":")
        if kind != "sentencepiece":
            return load_tokenizer(spec, request.eod), Progress(asked, spec)
        if not size.isdecimal():
            raise DataError(
                f"--tokenizer {spec}: give the number of pieces, as in sentencepiece:32000"
            )
        tokenizer = train_sentencepiece(training_texts(self._corpus, self._report), int(size))
        (name,) = tokenizer.save(unfinished(self.directory))
        progress = Progress(asked, str(unfinished(self.directory) / name))
        write_progress(self.directory, progress)  # learning takes long; it need not be repeated
        return tokenizer, progress

    def _tokenize(
        self, tokenizer: Tokenizer, encoder: Encode, splits: Splits, progress: Progress
    ) -> int:
        """Write all that is not written yet; return the number of records in all."""
        workers = self._workers or _workers_that_pay(self._corpus, tokenizer)
        total = max(self._corpus.nbytes, 1)
        chunks = self._corpus.chunks(progress.position)
        records = progress.position.documents
        for encoded in encode_chunks(chunks, encoder, workers):
            self._fraction = min(encoded.chunk.read / total, 1.0)
            splits.write(encoded)
            records = encoded.chunk.after.documents
            self._nbytes = splits.nbytes
            self._report("tokenizing", self._fraction)
        return records


def training_texts(corpus: Corpus, report: Report) -> Iterator[str]:
    """The clean texts of a corpus that are not held out, for a tokenizer to learn from."""
    total = max(corpus.nbytes, 1)
    for chunk in corpus.chunks():
        report("reading for the tokenizer", min(chunk.read / total, 1.0))
        split = corpus.split(chunk)
        for text, number in zip(corpus.texts(chunk), split, strict=True):
            if number == TRAIN:
                yield text
    report("learning the tokenizer", 0.0)


def _workers_that_pay(corpus: Corpus, tokenizer: Tokenizer) -> int:
    if isinstance(tokenizer, ByteTokenizer):
        return 1  # moving text between processes takes longer than copying its bytes
    return max(1, min(host.usable_cores(), corpus.nbytes // _PER_WORKER))


def _size(nbytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"
