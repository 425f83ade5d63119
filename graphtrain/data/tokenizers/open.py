"""Opening of a tokenizer by its name or file."""

from pathlib import Path

from graphtrain.data.tokenizers.byte import ByteTokenizer
from graphtrain.data.tokenizers.characters import SUFFIX, CharacterTokenizer
from graphtrain.data.tokenizers.huggingface import read_gpt2, read_huggingface
from graphtrain.data.tokenizers.protocol import Tokenizer
from graphtrain.data.tokenizers.sentencepiece_model import SentencePieceTokenizer
from graphtrain.data.tokenizers.special_tokens import TOKENIZER_CONFIG
from graphtrain.errors import DataError
from sharding_rules.documents import DocumentError, read_bytes

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", f"tokenizer{SUFFIX}")


def load_tokenizer(spec: str | Path, eod: str | None = None) -> Tokenizer:
    """Load a tokenizer.

    Args:
        spec: `bytes`, a sentencepiece FILE.model, a tokenizer.json, the FILE.chars of `chars`,
            GPT-2's VOCAB.json,MERGES.txt, or a folder that contains one of these files.
        eod: Text of the end-of-document token. None: the tokenizer's own.

    Raises:
        DataError: the file does not exist, is not a tokenizer, or has no token `eod`.
    """
    if str(spec) == ByteTokenizer.kind:
        if eod is not None:
            raise DataError(
                "--eod-token does not apply to the tokenizer bytes, whose end token is 256"
            )
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir():
        path = _tokenizer_in_folder(path)
    if path.suffix == ".model":
        config = path.parent / TOKENIZER_CONFIG
        try:
            config_bytes = read_bytes(config) if config.is_file() else None
            return SentencePieceTokenizer(read_bytes(path), str(path), eod, config_bytes)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        except DocumentError as error:
            raise DataError(f"{path}: {error}") from None
    if path.suffix == SUFFIX:
        return _read_characters(path, eod)
    vocab, comma, merges = str(path).partition(",")
    if comma:
        return read_gpt2(Path(vocab), Path(merges), eod)
    if path.suffix == ".json":
        return read_huggingface(path, eod)
    raise DataError(
        f"unknown tokenizer {str(spec)!r}; use bytes, chars, FILE.model, tokenizer.json, "
        "VOCAB.json,MERGES.txt, a folder that contains one of them, or sentencepiece:VOCAB"
    )


def _read_characters(path: Path, eod: str | None) -> CharacterTokenizer:
    check_no_eod(eod)
    try:
        return CharacterTokenizer(read_bytes(path), str(path))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except DocumentError as error:
        raise DataError(f"{path}: {error}") from None


def check_no_eod(eod: str | None) -> None:
    """Refuse a name for the end of a document with the tokenizer chars, which has its own.

    Raises:
        DataError: there is one.
    """
    if eod is not None:
        raise DataError("--eod-token does not apply to the tokenizer chars, which has its own")


def _tokenizer_in_folder(folder: Path) -> Path:
    """Return the path of the tokenizer in a folder, for example of a model."""
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            return folder / name
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return Path(f"{folder / 'vocab.json'},{folder / 'merges.txt'}")
    # A dataset of the tokenizer bytes has no file of it; its description is not read here.
    hint = (
        "; it contains a dataset: if that was prepared with bytes, pass --tokenizer bytes"
        if any(folder.glob("*.idx"))
        else ""
    )
    raise DataError(
        f"{folder}: contains no tokenizer.json, tokenizer.model, or vocab.json with merges.txt"
        f"{hint}"
    )
