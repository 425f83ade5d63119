"""manifest.json: record of the request that a directory was made from, to skip equal requests."""

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphtrain.data.readers.cleaning import hook_digest
from graphtrain.data.readers.corpus import Corpus
from graphtrain.data.readers.json_lines import open_file
from graphtrain.data.tokenizers.characters import CharacterTokenizer
from graphtrain.data.tokenizers.open import check_no_eod, load_tokenizer
from graphtrain.errors import DataError
from graphtrain.files import atomic_write, content_digest
from sharding_rules.documents import read_json

_FORMAT = 2  # version of the output of prepare; increase it when equal requests give other files
_TRAINED_PREFIX = "sentencepiece:"
# Fields that older manifests omit, with the value that they had.
_ADDED_FIELDS = {"bos": None, "split_by": "documents", "validation_files": 0, "images": None}
_MANIFEST = "manifest.json"
# How a field of a request is called in a message.
_WORDS = {
    "inputs": "the text",
    "endings": "the text",
    "append_eod": "--eod",
    "eod": "--eod-token",
    "bos": "--bos",
    "keys": "--key",
    "text_document": "--text-document",
    "split_by": "--split",
    "validation_files": "--validation-from",
    "conversations": "the chat template, --format or --train-on",
    "images": "the images, --processor, --image-size or the version of transformers or Pillow",
    "format": "the version of graphtrain",
}


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
    split_by: str = "documents"
    validation_files: int = 0
    images: tuple[str, ...] | None = None  # digests of them and of the processor, their size
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
        images: tuple[str, ...] | None = None,
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
            split_by=corpus.split_by,
            validation_files=corpus.validation_files,
            conversations=conversations,
            images=images,
        )


def write_manifest(directory: Path, request: PrepareRequest, files: Sequence[str]) -> None:
    """Record a request and the sizes of the files made from it."""
    lengths = {name: (directory / name).stat().st_size for name in files}
    with atomic_write(directory / _MANIFEST) as file:
        record = {"request": asdict(request), "files": lengths}
        file.write((json.dumps(record, indent=2) + "\n").encode())


def remove_manifest(directory: Path) -> None:
    """Remove the manifest of a directory, if it exists."""
    (directory / _MANIFEST).unlink(missing_ok=True)


def is_up_to_date(directory: Path, request: PrepareRequest) -> bool:
    """Return True if the directory contains all files that the request would make."""
    manifest = _read_manifest(directory)
    if manifest is None or differences(manifest[0], request):
        return False
    files = [(directory / name, length) for name, length in manifest[1].items()]
    return all(path.is_file() and path.stat().st_size == length for path, length in files)


def check_replaceable(directory: Path, request: PrepareRequest, names: Sequence[str]) -> None:
    """Refuse to replace datasets that were not made from this request.

    Args:
        directory: Output directory.
        request: The request.
        names: Names of the files of datasets.

    Raises:
        DataError: the directory has such files; says what differs.
    """
    present = [name for name in names if (directory / name).exists()]
    manifest = _read_manifest(directory)
    remedy = "choose another --output, or replace it with --replace"
    if manifest is not None and (changed := differences(manifest[0], request)):
        raise DataError(
            f"{directory}: holds a dataset that was made from another request, which differs in "
            f"{', '.join(changed)}; {remedy}"
        )
    if manifest is None and present:
        raise DataError(
            f"{directory}: holds {present[0]}, and no {_MANIFEST} says what it was made from; "
            f"{remedy}"
        )


def differences(saved: Mapping[str, Any], request: PrepareRequest) -> list[str]:
    """Return what differs between the request of a manifest and another, for messages."""
    current = json.loads(json.dumps(asdict(request)))
    names = [name for name in current if saved.get(name) != current[name]]
    words = [_WORDS.get(name, f"--{name}") for name in names]
    values = {"validation", "test", "seed", "text_document", "split_by"}
    return list(
        dict.fromkeys(
            f"{word} ({saved.get(name)}, now {current[name]})" if name in values else word
            for name, word in zip(names, words, strict=True)
        )
    )


def _read_manifest(directory: Path) -> tuple[dict[str, Any], dict[str, int]] | None:
    """Return the request of a manifest and the sizes of its files; None: absent or damaged."""
    try:
        record = read_json(directory / _MANIFEST)
        return _ADDED_FIELDS | record["request"], dict(record["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _tokenizer_identity(spec: str, eod: str | None) -> str:
    if spec == CharacterTokenizer.kind:
        check_no_eod(eod)
        return spec
    if spec.startswith(_TRAINED_PREFIX):
        return f"{spec} by {importlib.metadata.version('sentencepiece')}"
    tokenizer = load_tokenizer(spec, eod)  # the end token may come from a companion file
    begin = f", begin with {tokenizer.prefix}" if tokenizer.prefix else ""
    return f"{tokenizer.digest}, documents end with {tokenizer.eod}{begin}"
