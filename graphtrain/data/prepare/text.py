"""Tokenization of text into indexed datasets: training, validation and test splits."""

import contextlib
import errno
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from graphtrain.data.indexed.description import (
    ConversationSettings,
    DatasetDescription,
    read_description,
)
from graphtrain.data.indexed.images import ImageSettings
from graphtrain.data.indexed.verify import damage
from graphtrain.data.prepare import manifest
from graphtrain.data.prepare.encode import ChunkEncoder, EncodedChunk, TextEncoder, encode_chunks
from graphtrain.data.prepare.output_lock import locked_output
from graphtrain.data.prepare.progress import (
    PrepareProgress,
    read_progress,
    remove_progress,
    resume_folder,
    write_progress,
)
from graphtrain.data.prepare.ray_workers import encode_on_cluster, require_ray
from graphtrain.data.prepare.splits import (
    DATASET_FILES,
    SplitWriters,
    partial_files_exist,
    split_names,
)
from graphtrain.data.readers.corpus import TRAIN, Chunk, Corpus, SplitBy
from graphtrain.data.readers.records import TextDocument
from graphtrain.data.tokenizers.byte import ByteTokenizer
from graphtrain.data.tokenizers.characters import CharacterTokenizer, train_characters
from graphtrain.data.tokenizers.open import load_tokenizer
from graphtrain.data.tokenizers.protocol import Tokenizer
from graphtrain.data.tokenizers.special_tokens import document_prefix
from graphtrain.data.tokenizers.train_sentencepiece import train_sentencepiece
from graphtrain.errors import DataError
from lowering.machine import host

ProgressCallback = Callable[
    [str, float], None
]  # called with the current stage and its completed fraction

_BYTES_PER_WORKER = (
    4 << 20
)  # bytes of text; tokenizing less takes less time than starting a process


@dataclass(frozen=True)
class PrepareResult:
    """Result of `prepare`: the datasets in a directory."""

    directory: Path
    train: DatasetDescription
    validation: DatasetDescription | None
    test: DatasetDescription | None
    up_to_date: bool  # the directory already contained the result; nothing was written
    skipped_records: int = 0  # records that contributed no document
    omitted_text: str | None = None  # what was left out of text files, for a message


def prepare(
    inputs: Sequence[str | Path],
    output: str | Path,
    tokenizer: str,
    *,
    keys: Sequence[str] = ("text",),
    clean: Sequence[str] = (),
    text_document: TextDocument = "paragraph",
    bos: bool | None = None,
    append_eod: bool = True,
    eod: str | None = None,
    validation: float | None = None,
    validation_from: Sequence[str | Path] = (),
    split_by: SplitBy = "documents",
    test: float = 0.0,
    seed: int = 0,
    replace: bool = False,
    workers: int | None = None,
    ray: str | None = None,
    report: ProgressCallback = lambda stage, fraction: None,
) -> PrepareResult:
    """Make OUTPUT/train, validation and test from text files; equal inputs give equal bytes.

    If the directory already contains the result undamaged, nothing is written. If preparing fails,
    the directory keeps its previous content. If the process was killed, the next call with the same
    arguments resumes from the files on disk.

    Args:
        inputs: Files, or folders written by `datasets.Dataset.save_to_disk`.
        output: Output directory.
        tokenizer: A name that `load_tokenizer` accepts, `sentencepiece:VOCAB` to train a
            sentencepiece model of VOCAB pieces on the training text, or `chars` for its characters.
        keys: Keys or columns that contain the text; several are joined by a blank line.
        clean: Cleaning hooks, MODULE:FUNCTION, applied in order.
        text_document: Unit of a .txt file that becomes one document.
        bos: Begin every document with the beginning-of-sequence token. None: as the tokenizer
            does by itself.
        append_eod: End every document with the end-of-document token.
        eod: Text of the end-of-document token. None: the tokenizer's own.
        validation: Fraction held out for validation. None: 0.05, or 0 with `validation_from`.
        validation_from: Files and folders of which every document is for validation.
        split_by: Hold out whole documents, or the end of the text of each.
        test: Fraction held out for test.
        seed: Seed of the choice of held-out documents.
        replace: Replace a dataset that was made from another request.
        workers: Worker processes; the result does not depend on it. None: chosen by the size of
            the text and the number of cores.
        ray: Address of a Ray cluster whose machines tokenize in place of worker processes:
            "HOST:PORT", "auto", or "local" to start one on this machine; `workers` is then the
            maximum number of chunks in flight. The result does not depend on it.
        report: Called with the current stage and its completed fraction.

    Raises:
        DataError: an input, the tokenizer or the output cannot be used.
    """
    corpus = Corpus.from_inputs(
        inputs,
        keys=tuple(keys),
        clean=tuple(clean),
        text_document=text_document,
        validation=validation,
        validation_from=validation_from,
        split_by=split_by,
        test=test,
        seed=seed,
    )
    request = manifest.PrepareRequest.from_corpus(corpus, tokenizer, bos, append_eod, eod)
    converter = TextConverter(append_eod, bos)
    preparation = Preparation(Path(output), corpus, converter, workers, report, replace, ray)
    return preparation.run(request, tokenizer)


class RecordEncoder(Protocol):
    """Conversion of records into documents."""

    @property
    def documents(self) -> int:
        """Documents per record."""
        ...

    @property
    def append_eod(self) -> bool:
        """True if every document ends with the end-of-document token."""
        ...

    def prefix(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the token ids that begin the documents: BOS, if they have one."""
        ...

    @property
    def conversations(self) -> ConversationSettings | None:
        """Description of the conversations; None for plain text, which has no loss mask."""
        ...

    @property
    def images(self) -> ImageSettings | None:
        """Description of the images; None if documents have none."""
        ...

    def encoder(self, tokenizer: Tokenizer, corpus: Corpus) -> ChunkEncoder:
        """Return the function that encodes chunks of the corpus."""
        ...

    def save(self, directory: Path) -> tuple[str, ...]:
        """Write additional files next to the tokenizer; return their names."""
        ...


@dataclass(frozen=True)
class TextConverter:
    """Plain text: each record becomes one document."""

    append_eod: bool
    bos: bool | None = None  # None: as the tokenizer does by itself
    documents = 1
    conversations = None
    images = None

    def prefix(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        return document_prefix(tokenizer, self.bos)

    def encoder(self, tokenizer: Tokenizer, corpus: Corpus) -> ChunkEncoder:
        if self.append_eod and tokenizer.eod is None:
            raise DataError(
                "the tokenizer has no end-of-document token; name one with --eod-token, choose "
                "another tokenizer, or pass --no-eod"
            )
        return TextEncoder(tokenizer, corpus, self.append_eod, self.prefix(tokenizer))

    def save(self, directory: Path) -> tuple[str, ...]:
        return ()


class Preparation:
    """One pass over a corpus that writes the datasets of a directory."""

    def __init__(
        self,
        directory: Path,
        corpus: Corpus,
        making: RecordEncoder,
        workers: int | None,
        report: ProgressCallback,
        replace: bool = False,
        ray: str | None = None,
    ) -> None:
        self.directory = directory
        self._replace = replace
        self._corpus = corpus
        self._making = making
        self._left_out = 0
        self._workers = workers
        self._ray = ray
        if ray is not None:
            require_ray()  # before a tokenizer is trained, which takes time
        self._report = report
        self._fraction = 0.0  # of the corpus that has been tokenized
        self._nbytes = 0  # written so far

    def run(self, request: manifest.PrepareRequest, spec: str) -> PrepareResult:
        """Return the content of the directory; write it first unless it is up to date.

        Raises:
            DataError: an input, the tokenizer or the output cannot be used.
        """
        for path in (self.directory, *self.directory.parents):
            if path.exists() and not path.is_dir():
                raise DataError(f"{path} is a file; name a directory for the datasets")
        with self._disk_errors(), locked_output(self.directory):
            names = split_names(self._corpus)
            up_to_date = manifest.is_up_to_date(self.directory, request)
            if up_to_date and (damaged := self._damage(names)):
                warnings.warn(f"{damaged}; preparing the dataset again", stacklevel=2)
                up_to_date = False
            if not up_to_date:
                files = self._write(request, spec)
                manifest.write_manifest(self.directory, request, files)
                remove_progress(self.directory)
            descriptions = {name: read_description(self.directory / name) for name in names}
        train = descriptions["train"]
        assert train is not None
        held_out = descriptions.get("validation"), descriptions.get("test")
        omitted = self._corpus.omitted_text
        return PrepareResult(self.directory, train, *held_out, up_to_date, self._left_out, omitted)

    def _damage(self, names: Sequence[str]) -> str | None:
        """Say which file is not as it was written, after reading all of them.

        The inputs, which are about as large, were read to recognize the request.
        """
        return next(filter(None, (damage(self.directory / name) for name in names)), None)

    def _write(self, request: manifest.PrepareRequest, spec: str) -> list[str]:
        """Write the datasets, descriptions and tokenizer; return the file names.

        Raises:
            DataError: the directory holds a dataset that was made from another request.
        """
        if not self._replace and read_progress(self.directory, asdict(request)) is None:
            manifest.check_replaceable(self.directory, request, DATASET_FILES)
        tokenizer, progress = self._tokenizer_and_progress(request, spec)
        encoder = self._making.encoder(tokenizer, self._corpus)
        conversations, images = self._making.conversations, self._making.images
        with SplitWriters(
            self.directory,
            self._corpus,
            tokenizer,
            progress,
            learned=conversations is not None,
            images=images is not None,
        ) as splits:
            records = self._tokenize(tokenizer, encoder, splits, progress)
            self._left_out = records - splits.documents // self._making.documents
            splits.complete()
        self._report("writing", 1.0)
        prefix = self._making.prefix(tokenizer)
        files = splits.describe(prefix, self._making.append_eod, conversations, images)
        return [*files, *self._making.save(self.directory)]

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Turn operating system errors into a `DataError` that says what to do."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self.directory.is_dir():
                raise DataError(f"{error.filename}: {error.strerror}") from None
            free = shutil.disk_usage(self.directory).free
            required = f"about {_size(self._nbytes / self._fraction)}" if self._fraction else "more"
            raise DataError(
                f"{error.filename}: the disk is full after {_size(self._nbytes)} "
                f"({self._fraction:.0%} of the text); {required} is needed and {_size(free)} is "
                f"free in {self.directory}. Free space there, or choose another --output"
            ) from None

    def _tokenizer_and_progress(
        self, request: manifest.PrepareRequest, spec: str
    ) -> tuple[Tokenizer, PrepareProgress]:
        """Return the tokenizer and the progress of an interrupted preparation of this request."""
        request_fields = asdict(request)
        progress = read_progress(self.directory, request_fields)
        if progress is not None:
            try:
                tokenizer = load_tokenizer(progress.tokenizer, request.eod)
            except DataError:  # the folder was moved since; use the tokenizer that was asked for
                pass
            else:
                if partial_files_exist(self.directory, tokenizer.vocab, progress.written or {}):
                    return tokenizer, progress
        kind, _, size = spec.partition(":")
        if kind not in ("sentencepiece", CharacterTokenizer.kind):
            return load_tokenizer(spec, request.eod), PrepareProgress(request_fields, spec)
        if kind == "sentencepiece" and not size.isdecimal():
            raise DataError(
                f"--tokenizer {spec}: give the vocabulary size, for example sentencepiece:32000"
            )
        texts = training_texts(self._corpus, self._report)
        tokenizer = train_sentencepiece(texts, int(size)) if size else train_characters(texts)
        (name,) = tokenizer.save(resume_folder(self.directory))
        progress = PrepareProgress(request_fields, str(resume_folder(self.directory) / name))
        write_progress(self.directory, progress)  # do not repeat the training of the tokenizer
        return tokenizer, progress

    def _tokenize(
        self,
        tokenizer: Tokenizer,
        encoder: ChunkEncoder,
        splits: SplitWriters,
        progress: PrepareProgress,
    ) -> int:
        """Write the documents after the recorded progress; return the total number of records."""
        total = max(self._corpus.nbytes, 1)
        chunks = self._corpus.chunks(progress.position)
        records = progress.position.documents
        for encoded in self._encode(chunks, encoder, tokenizer):
            self._fraction = min(encoded.chunk.bytes_read / total, 1.0)
            splits.write(encoded)
            records = encoded.chunk.next_position.documents
            self._nbytes = splits.nbytes
            self._report("tokenizing", self._fraction)
        return records

    def _encode(
        self, chunks: Iterator[Chunk], encoder: ChunkEncoder, tokenizer: Tokenizer
    ) -> Iterator[EncodedChunk]:
        """Yield encoded chunks in order, encoded on this machine or on a cluster."""
        if self._ray is not None:
            return encode_on_cluster(chunks, encoder, self._ray, self._workers)
        workers = self._workers or _default_workers(self._corpus, tokenizer)
        return encode_chunks(chunks, encoder, workers)


def training_texts(corpus: Corpus, report: ProgressCallback) -> Iterator[str]:
    """Yield the cleaned training texts of a corpus, without held-out documents."""
    total = max(corpus.nbytes, 1)
    for chunk in corpus.chunks():
        report("reading for the tokenizer", min(chunk.bytes_read / total, 1.0))
        split_ids = corpus.split(chunk)
        for text, split_id in zip(corpus.texts(chunk), split_ids, strict=True):
            if split_id == TRAIN:
                yield text
    report("training the tokenizer", 0.0)


def _default_workers(corpus: Corpus, tokenizer: Tokenizer) -> int:
    if isinstance(tokenizer, ByteTokenizer):
        return 1  # sending text to another process takes longer than encoding it
    return max(1, min(host.usable_cores(), corpus.nbytes // _BYTES_PER_WORKER))


def _size(nbytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"
