"""Writer of the datasets of a directory: one for each split of a corpus."""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

from graphtrain.data.indexed.dataset import (
    HEADER,
    IndexedDataset,
    dataset_paths,
    file_digests,
    token_dtype,
)
from graphtrain.data.indexed.description import (
    ConversationSettings,
    DatasetDescription,
    all_begin_with,
    write_description,
)
from graphtrain.data.indexed.images import (
    PIXEL_DTYPE,
    ImageSettings,
    images_prefix,
    images_writer,
)
from graphtrain.data.indexed.loss_spans import SPAN_DTYPE, loss_spans_prefix, loss_spans_writer
from graphtrain.data.indexed.writer import NOTHING_WRITTEN, IndexedWriter, WrittenCounts
from graphtrain.data.prepare import manifest
from graphtrain.data.prepare.encode import EncodedChunk
from graphtrain.data.prepare.progress import PrepareProgress, remove_progress, write_progress
from graphtrain.data.readers.corpus import Corpus
from graphtrain.data.tokenizers.protocol import CHAT_TEMPLATE, Tokenizer
from graphtrain.data.tokenizers.special_tokens import TOKENIZER_CONFIG
from graphtrain.errors import DataError
from graphtrain.files import counted, partial_path

SPLITS = ("train", "validation", "test")
_ENDINGS = ("bin", "idx", "json")
DATASET_FILES = tuple(f"{name}.{ending}" for name in SPLITS for ending in _ENDINGS)
_SAVE_EVERY = 10.0  # seconds between saves of the progress; a kill loses at most this work


def split_names(corpus: Corpus) -> tuple[str, ...]:
    """Return the names of the splits that a corpus has."""
    return tuple(name for name, used in zip(SPLITS, corpus.split_sizes, strict=True) if used)


class SplitWriters:
    """Context manager that writes all splits; on disk they appear together, or not at all.

    An error leaves the directory unchanged. An interruption leaves partial files and a record of
    the progress, from which the next preparation of the same request resumes.

    Args:
        directory: Output directory.
        corpus: Assigns documents to splits.
        tokenizer: Saved next to the datasets.
        progress: Progress of an interrupted preparation, or none.
        learned: Also write the loss mask of the documents.
        images: Also write the images of the documents.
    """

    def __init__(
        self,
        directory: Path,
        corpus: Corpus,
        tokenizer: Tokenizer,
        progress: PrepareProgress,
        learned: bool = False,
        images: bool = False,
    ) -> None:
        self._directory, self._corpus, self._tokenizer = directory, corpus, tokenizer
        self._progress = progress
        self._saved = time.monotonic()
        written = progress.written or {}
        self._writers = {
            name: IndexedWriter(
                directory / name, tokenizer.vocab, keep=written.get(name, NOTHING_WRITTEN)
            )
            for name in split_names(corpus)
        }
        self._learned = {
            name: loss_spans_writer(
                directory / name, written.get(loss_spans_prefix(name), NOTHING_WRITTEN)
            )
            for name in (self._writers if learned else ())
        }
        self._images = {
            name: images_writer(directory / name, written.get(images_prefix(name), NOTHING_WRITTEN))
            for name in (self._writers if images else ())
        }
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "SplitWriters":
        with self._stack:
            for writer in self._all.values():
                self._stack.enter_context(writer)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        if kind is not None and issubclass(kind, Exception):
            remove_progress(self._directory)

    @property
    def nbytes(self) -> int:
        """Total bytes of all files if they were finished now."""
        return sum(writer.nbytes for writer in self._all.values())

    @property
    def documents(self) -> int:
        """Number of documents written so far, in all splits."""
        return sum(writer.documents for writer in self._writers.values())

    @property
    def _all(self) -> dict[str, IndexedWriter]:
        """Writers by file name: of the tokens, then of the loss masks, then of the images."""
        learned = {loss_spans_prefix(name): writer for name, writer in self._learned.items()}
        images = {images_prefix(name): writer for name, writer in self._images.items()}
        return self._writers | learned | images

    def write(self, encoded: EncodedChunk) -> None:
        """Write the documents of a chunk that are not empty, each to its split."""
        split_ids = self._corpus.split(encoded.chunk)
        split_ids = np.repeat(split_ids, len(encoded.sizes) // len(split_ids))
        for split_id, name in enumerate(SPLITS):
            mask = split_ids == split_id
            if mask.any():
                sizes = encoded.sizes[mask]
                tokens = encoded.tokens[np.repeat(mask, encoded.sizes)]
                self._writers[name].extend(tokens, sizes[sizes > 0])
                if encoded.loss_spans is not None and encoded.loss_span_sizes is not None:
                    spans = encoded.loss_spans[np.repeat(mask, encoded.loss_span_sizes)]
                    self._learned[name].extend(spans, encoded.loss_span_sizes[mask][sizes > 0])
                if encoded.pixels is not None and encoded.pixel_sizes is not None:
                    pixels = _of_documents(encoded.pixels, encoded.pixel_sizes, mask)
                    self._images[name].extend(pixels, encoded.pixel_sizes[mask][sizes > 0])
        if time.monotonic() - self._saved > _SAVE_EVERY:
            self._save(encoded)

    def complete(self) -> None:
        """Finish the files, then remove the descriptions of the files they are about to replace.

        Raises:
            DataError: a split is too small to be used.
        """
        self._check_sizes()
        for writer in self._all.values():
            writer.complete()
        # Without it, the files of a preparation that is killed before it writes its manifest would
        # not be known to be of the same request.
        write_progress(self._directory, self._progress)
        manifest.remove_manifest(self._directory)
        for name in (*SPLITS, *map(loss_spans_prefix, SPLITS), *map(images_prefix, SPLITS)):
            stale_endings = _ENDINGS if name not in self._all else ("json",)
            for ending in stale_endings:
                (self._directory / f"{name}.{ending}").unlink(missing_ok=True)
        for name in (CHAT_TEMPLATE, TOKENIZER_CONFIG):  # of another tokenizer
            (self._directory / name).unlink(missing_ok=True)

    def describe(
        self,
        prefix: tuple[int, ...],
        append_eod: bool,
        conversations: ConversationSettings | None = None,
        images: ImageSettings | None = None,
    ) -> list[str]:
        """Write tokenizer and descriptions next to finished datasets; return all file names.

        Args:
            prefix: BOS; recorded for a dataset if all of its documents begin with it.
            append_eod: Whether all documents end with the end-of-document token.
            conversations: Settings of the conversations. None: plain text.
            images: Settings of the images. None: there are none.
        """
        tokenizer_files = self._tokenizer.save(self._directory)
        for name, writer in self._writers.items():
            path = self._directory / name
            description = DatasetDescription(
                tokenizer=self._tokenizer.kind,
                tokenizer_digest=self._tokenizer.digest,
                tokenizer_file=tokenizer_files[0] if tokenizer_files else None,
                vocab=self._tokenizer.vocab,
                bos=prefix if all_begin_with(IndexedDataset(path), prefix) else (),
                eod=self._tokenizer.eod if append_eod else None,
                documents=writer.documents,
                tokens=writer.token_count,
                digests=file_digests(path),
                conversations=conversations and conversations.of(path),
                images=images and images.of(path),
            )
            write_description(path, description)
        files = [f"{name}.{ending}" for name in self._all for ending in _ENDINGS[:2]]
        return [*files, *(f"{name}.json" for name in self._writers), *tokenizer_files]

    def _save(self, encoded: EncodedChunk) -> None:
        for writer in self._all.values():
            writer.sync()
        written = {name: writer.written for name, writer in self._all.items()}
        write_progress(
            self._directory, self._progress.at_position(encoded.chunk.next_position, written)
        )
        self._saved = time.monotonic()

    def _check_sizes(self) -> None:
        documents = self.documents
        if not documents:
            names = ", ".join(map(str, self._corpus.paths))
            if self._learned:
                raise DataError(f"{names}: no record contains an answer to train on")
            raise DataError(f"{names}: the corpus is empty; give files that contain text")
        for name, writer in self._writers.items():
            if writer.token_count < 2:
                raise DataError(
                    f"the {name} split has {counted(writer.token_count, 'token')} and needs at "
                    f"least 2: {self._choice} assigns {writer.documents} of "
                    f"{counted(documents, 'document')} to it; {self._remedy}"
                )

    @property
    def _choice(self) -> str:
        """Options that assign documents to splits, for messages."""
        corpus = self._corpus
        if corpus.validation_files:
            return "--validation-from"
        test = f" --test {corpus.test}" if corpus.test else ""
        way = "--split text" if corpus.split_by == "text" else f"--seed {corpus.seed}"
        return f"--validation {corpus.validation}{test} {way}"

    @property
    def _remedy(self) -> str:
        """Remedy for a split that is too small, for messages."""
        if self._corpus.validation_files:
            return "give files with more text"
        if self._corpus.split_by == "text" or self._learned:
            return "give more text, or other fractions (0 omits a split)"
        return (
            "--split text holds out the end of each document instead of whole documents, and "
            "--validation-from names files for validation; or give more documents, or other "
            "fractions (0 omits a split)"
        )


def _of_documents(values: np.ndarray, sizes: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the values of the chosen documents; without a mask as large as the values."""
    if mask.all():
        return values
    starts = np.cumsum(sizes) - sizes
    chosen = zip(starts[mask], sizes[mask], strict=True)
    return np.concatenate([values[start : start + size] for start, size in chosen])


def partial_files_exist(directory: Path, vocab: int, written: Mapping[str, WrittenCounts]) -> bool:
    """Return True if the partial files contain everything that the progress record lists."""
    for name, (documents, tokens) in written.items():
        width = _dtype_of(name, vocab).itemsize
        min_sizes = tokens * width, documents and HEADER.size + 4 * documents
        for path, nbytes in zip(dataset_paths(directory / name), min_sizes, strict=True):
            partial = partial_path(path)
            if nbytes and not (partial.is_file() and partial.stat().st_size >= nbytes):
                return False
    return True


def _dtype_of(name: str, vocab: int) -> np.dtype:
    """Return the dtype of the values of a .bin by its name."""
    if any(name == loss_spans_prefix(split) for split in SPLITS):
        return SPAN_DTYPE
    return (
        PIXEL_DTYPE if any(name == images_prefix(split) for split in SPLITS) else token_dtype(vocab)
    )
