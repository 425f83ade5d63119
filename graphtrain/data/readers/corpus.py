"""Files of documents, read in chunks that record their position in the corpus."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from graphtrain.data.readers import tables
from graphtrain.data.readers.cleaning import clean
from graphtrain.data.readers.json_lines import COMPRESSED_SUFFIXES, open_file, read_lines
from graphtrain.data.readers.records import FilePosition, Record, RecordGroup, TextDocument
from graphtrain.data.shuffle import sample_mask
from graphtrain.errors import DataError

TRAIN, VALIDATION, TEST = 0, 1, 2  # splits
_SPLIT = 0x73706C6974  # salt: makes this choice independent of other uses of the seed
_TEXT = (".txt", ".text")
_UNREAD = (".csv", ".tsv")

# documents: each document is in one split. text: the first part of each document is for training,
# and the rest of it is held out.
SplitBy = Literal["documents", "text"]
# What the unit of a document leaves out of a text file.
_OMITTED_TEXT = {
    "paragraph": "each paragraph of a text file is a document, and the blank lines between them "
    "are left out; --text-document file keeps them",
    "line": "each line of a text file is a document, and its line break is left out; "
    "--text-document file keeps them",
    "file": "line breaks at the beginning and the end of a text file are left out",
}


class CorpusPosition(NamedTuple):
    """Position in a corpus at which reading starts; saved as JSON to resume a preparation."""

    file: int = 0
    place: FilePosition = FilePosition()
    documents: int = 0  # number of documents before it in the entire corpus


CORPUS_START = CorpusPosition()


@dataclass(frozen=True)
class Chunk:
    """Some documents of one file, unparsed."""

    path: Path
    line_numbers: tuple[int, ...]  # line or row numbers in the file, from 1
    records: tuple[Record, ...]
    first_document: int  # index of the first document in the entire corpus
    next_position: CorpusPosition  # at which the next chunk begins
    bytes_read: int  # bytes read so far of all files, compressed bytes if they are compressed


@dataclass(frozen=True)
class Corpus:
    """Files of documents, and the assignment of documents to training, validation and test."""

    paths: tuple[Path, ...]  # the last `validation_files` of them are for validation
    keys: tuple[str, ...] = ("text",)  # empty: complete records are read
    clean: tuple[str, ...] = ()  # hooks, MODULE:FUNCTION
    text_document: TextDocument = "paragraph"
    validation: float = 0.0  # fraction of the documents
    test: float = 0.0  # fraction of the documents
    seed: int = 0
    split_by: SplitBy = "documents"
    validation_files: int = 0
    group_bytes: int | None = None  # approximate bytes of the records of a chunk; None: a megabyte

    @classmethod
    def from_inputs(
        cls,
        inputs: Sequence[str | Path],
        *,
        validation: float | None = None,
        validation_from: Sequence[str | Path] = (),
        **settings: Any,
    ) -> "Corpus":
        """Build a corpus from files, and folders written by `datasets.Dataset.save_to_disk`.

        Args:
            inputs: Files and folders, in order.
            validation: Fraction held out for validation. None: 0.05, or 0 with `validation_from`.
            validation_from: Files and folders of which every document is for validation.
            settings: The other fields of `Corpus`.

        Raises:
            DataError: a folder is of another kind, or the fractions leave nothing to train on.
        """
        if validation_from and validation:
            raise DataError(
                "--validation and --validation-from both choose the validation documents; omit one"
            )
        if validation is None:
            validation = 0.0 if validation_from else 0.05
        paths, held_out = _data_files(inputs), _data_files(validation_from)
        corpus = cls(
            (*paths, *held_out),
            validation=validation,
            validation_files=len(held_out),
            **settings,
        )
        for name, value in (("validation", corpus.validation), ("test", corpus.test)):
            if not 0 <= value < 1:
                raise DataError(f"{name} = {value} is not a fraction of at least 0 and below 1")
        if corpus.validation + corpus.test >= 1:
            raise DataError(
                "--validation and --test hold out every document; lower them to leave some to "
                "train on"
            )
        return corpus

    @property
    def split_sizes(self) -> tuple[bool, bool, bool]:
        """Return whether the corpus has documents for training, validation and test."""
        return True, bool(self.validation or self.validation_files), bool(self.test)

    @property
    def omitted_text(self) -> str | None:
        """Sentence that says what is left out of text files; None without text files."""
        return _OMITTED_TEXT[self.text_document] if any(map(is_text, self.paths)) else None

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes; of compressed files, their compressed size."""
        return sum(path.stat().st_size for path in self.paths)

    def chunks(self, start: CorpusPosition = CORPUS_START) -> Iterator[Chunk]:
        """Yield the documents from a position on, in order, in chunks of about a megabyte.

        Raises:
            DataError: a file does not exist, or its content does not match its suffix.
        """
        documents, file_position = start.documents, start.place
        finished = sum(path.stat().st_size for path in self.paths[: start.file])
        for file, path in enumerate(self.paths[start.file :], start.file):
            for group in self._groups(path, file_position):
                first_document, documents = documents, documents + len(group.records)
                next_position = CorpusPosition(file, group.next_position, documents)
                yield Chunk(
                    path,
                    group.numbers,
                    group.records,
                    first_document,
                    next_position,
                    finished + group.read,
                )
            finished += path.stat().st_size
            file_position = FilePosition()

    def split(self, chunk: Chunk) -> np.ndarray:
        """Return the split of each text of a chunk.

        That of a document is a function of its index and the seed.
        """
        if self._is_for_validation(chunk):
            return np.full(len(chunk.records), VALIDATION)
        if self.split_by == "text":
            return np.tile(self._splits_of_text, len(chunk.records))
        document_indices = np.arange(
            chunk.first_document, chunk.first_document + len(chunk.records)
        )
        held_out = sample_mask(document_indices, self.validation + self.test, _SPLIT, self.seed)
        validation = sample_mask(document_indices, self.validation, _SPLIT, self.seed)
        return np.where(validation, VALIDATION, np.where(held_out, TEST, TRAIN))

    def texts(self, chunk: Chunk) -> list[str]:
        """Return the cleaned text of each document of a chunk; a blank line joins several keys.

        With `split_by = "text"`, each document gives one text for each split.

        Raises:
            DataError: a record is not an object with strings under the keys, or a hook fails; names
                file and line.
        """
        unit = "row" if chunk.path.suffix in tables.TABLE_SUFFIXES else "line"
        cleaned = []
        for line_number, record in zip(chunk.line_numbers, chunk.records, strict=True):
            location = f"{chunk.path}: {unit} {line_number}"
            cleaned.append(clean(self._text(chunk.path, record, location), self.clean, location))
        if self.split_by == "text" and not self._is_for_validation(chunk):
            return [part for text in cleaned for part in self._parts(text)]
        return cleaned

    def _is_for_validation(self, chunk: Chunk) -> bool:
        return chunk.next_position.file >= len(self.paths) - self.validation_files

    @property
    def _splits_of_text(self) -> list[int]:
        """Splits among which each text is divided, in order."""
        fractions = {TRAIN: 1.0, VALIDATION: self.validation, TEST: self.test}
        return [split for split, fraction in fractions.items() if fraction]

    def _parts(self, text: str) -> list[str]:
        """Divide a text among `_splits_of_text`."""
        train = int(len(text) * (1 - self.validation - self.test))
        ends = [train, train + int(len(text) * self.validation)] if self.test else [train]
        ends = [*ends[: len(self._splits_of_text) - 1], len(text)]
        return [text[start:end] for start, end in itertools.pairwise([0, *ends])]

    def records(self, chunk: Chunk) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the place (file and line, for messages) and the parsed record of each document.

        Raises:
            DataError: a record is not a JSON object; names file and line.
        """
        unit = "row" if chunk.path.suffix in tables.TABLE_SUFFIXES else "line"
        for line_number, record in zip(chunk.line_numbers, chunk.records, strict=True):
            location = f"{chunk.path}: {unit} {line_number}"
            yield location, _parsed(record, (), location) if isinstance(record, bytes) else record

    def _text(self, path: Path, record: Record, location: str) -> str:
        if isinstance(record, bytes):
            if is_text(path):
                return _decoded(record, location)
            record = _parsed(record, self.keys, location)
        if len(self.keys) == 1:
            return _text(record, self.keys[0], location)
        return "\n\n".join([_text(record, key, location) for key in self.keys])

    def _groups(self, path: Path, start: FilePosition) -> Iterator[RecordGroup]:
        if path.suffix in tables.TABLE_SUFFIXES:
            open_file(path).close()  # reports a missing file in the same words as for other formats
            return tables.read_rows(path, self.keys, start)
        document: TextDocument = self.text_document if is_text(path) else "line"
        return read_lines(path, document, start, self.group_bytes)


def _data_files(inputs: Sequence[str | Path]) -> list[Path]:
    paths: list[Path] = []
    for path in map(Path, inputs):
        name = path.name.removesuffix(".gz").removesuffix(".zst").lower()
        if name.endswith(_UNREAD) and not path.is_dir():
            raise DataError(
                f"{path}: {' and '.join(_UNREAD)} files are not read; write each row as a JSON "
                "object in a line of its own (.jsonl), or as Parquet"
            )
        paths.extend(tables.arrow_files(path) if path.is_dir() else [path])
    return paths


def is_text(path: Path) -> bool:
    """Return whether a file is plain text, also if it is compressed."""
    return (Path(path.stem) if path.suffix in COMPRESSED_SUFFIXES else path).suffix in _TEXT


def _decoded(text: bytes, location: str) -> str:
    try:
        return text.decode().strip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{location}: byte {error.start} of this text is not UTF-8; convert the file to UTF-8, "
            "or give another file if it is a binary one"
        ) from None


def _parsed(line: bytes, keys: Sequence[str], location: str) -> dict[str, Any]:
    try:
        document = json.loads(line.decode("utf-8-sig"))  # of bytes, json would guess UTF-16
    except UnicodeDecodeError as error:
        raise DataError(
            f"{location}: byte {error.start} is not UTF-8 text, as of a binary file; give text "
            "(.txt), or one JSON object in each line"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{location}: not JSON ({error}); each line must be one JSON object"
        ) from None
    if not isinstance(document, dict):
        example = f"; give, for example, {{{json.dumps(keys[0])}: ...}}" if keys else ""
        raise DataError(f"{location}: not a JSON object{example}")
    return document


def _text(document: dict[str, Any], key: str, location: str) -> str:
    if key not in document:
        keys = ", ".join(map(repr, list(document)[:5])) or "nothing"
        remedy = (
            "prepare conversations with graphtrain data instruct"
            if "messages" in document
            else "choose a key with --key"
        )
        raise DataError(f"{location}: no key {key!r}, only {keys}; {remedy}")
    text = document[key]
    if not isinstance(text, str):
        raise DataError(f"{location}: {key!r} is not a string but {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{location}: {key!r} is not valid Unicode ({error.reason})") from None
    return text
