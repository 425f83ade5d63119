"""manifest.json: record of the request that a directory was made from, to skip equal requests."""

import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from graphtrain.data.readers.cleaning import hook_digest
from graphtrain.data.readers.corpus import Corpus
from graphtrain.data.readers.json_lines import open_file
from graphtrain.data.tokenizers.open import load_tokenizer
from graphtrain.files import atomic_write, content_digest
from sharding_rules.documents import read_json

_FORMAT = 2  # version of the output of prepare; increase it when equal requests give other files
_TRAINED_PREFIX = "sentencepiece:"


@dataclass(frozen=True, kw_only=True)
class PrepareRequest:
    """Everything that determines what `prepare` writes: contents, never file names or paths."""

    inputs: tuple[str, ...]  # digests, in order
    endings: tuple[str, ...]  # suffixes of the inputs, which determine how they are read
    tokenizer: str
    eod: str | None
    append_eod: bool
    keys: tuple[str, ...]
    clean: tuple[str, ...]  # digests
    text_document: str
    validation: float
    test: float
    seed: int
    conversations: tuple[str, ...] | None = None  # format, template digest, --train-on
    bos: bool | None = None  # None: as the tokenizer does by itself
    format: int = _FORMAT

    @classmethod
    def from_corpus(
        cls,
        corpus: Corpus,
        tokenizer: str,
        bos: bool | None,
        append_eod: bool,
        eod: str | None,
        conversations: tuple[str, ...] | None = None,
    ) -> "PrepareRequest":
        """Build a request with the digests of the files, the tokenizer and the hooks.

        Raises:
            DataError: one of them cannot be read.
        """
        for path in corpus.paths:
            open_file(path).close()
        return cls(
            inputs=tuple(content_digest(path) for path in corpus.paths),
            endings=tuple("".join(path.suffixes[-2:]) for path in corpus.paths),
            tokenizer=_tokenizer_identity(tokenizer, eod),
            bos=bos,
            eod=eod,
            append_eod=append_eod,
            keys=corpus.keys,
            clean=tuple(map(hook_digest, corpus.clean)),
            text_document=corpus.text_document,
            validation=corpus.validation,
            test=corpus.test,
            seed=corpus.seed,
            conversations=conversations,
        )


def write_manifest(directory: Path, request: PrepareRequest, files: Sequence[str]) -> None:
    """Record a request and the sizes of the files made from it."""
    lengths = {name: (directory / name).stat().st_size for name in files}
    with atomic_write(directory / "manifest.json") as file:
        record = {"request": asdict(request), "files": lengths}
        file.write((json.dumps(record, indent=2) + "\n").encode())


def remove_manifest(directory: Path) -> None:
    """Remove the manifest of a directory, if it exists."""
    (directory / "manifest.json").unlink(missing_ok=True)


def is_up_to_date(directory: Path, request: PrepareRequest) -> bool:
    """Return True if the directory contains all files that the request would make."""
    try:
        record = read_json(directory / "manifest.json")
        saved_request = {"bos": None} | record["request"]  # older manifests omit bos
        lengths = dict(record["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False  # absent or damaged: prepare everything again
    if saved_request != json.loads(json.dumps(asdict(request))):
        return False
    files = [(directory / name, length) for name, length in lengths.items()]
    return all(path.is_file() and path.stat().st_size == length for path, length in files)


def _tokenizer_identity(spec: str, eod: str | None) -> str:
    if spec.startswith(_TRAINED_PREFIX):
        return f"{spec} by {importlib.metadata.version('sentencepiece')}"
    tokenizer = load_tokenizer(spec, eod)  # the end token may come from a companion file
    begin = f", begin with {tokenizer.prefix}" if tokenizer.prefix else ""
    return f"{tokenizer.digest}, documents end with {tokenizer.eod}{begin}"
