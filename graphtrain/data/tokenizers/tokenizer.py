"""Tokenizers: text to token ids and back, each with a digest that identifies it."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from graphtrain.data.tokenizers.offsets import (
    TokensWithOffsets,
    character_offsets,
    encode_with_special_tokens,
)
from graphtrain.data.tokenizers.word_cache import (
    WORD_PARTS_PATTERN,
    WORDS_PATTERN,
    WordCache,
    context_free_pattern,
)
from graphtrain.errors import DataError
from graphtrain.files import atomic_write

CHAT_TEMPLATE = "chat_template.jinja"  # file next to a tokenizer


class Tokenizer(Protocol):
    """Conversion of text to token ids below `vocab` and back."""

    @property
    def kind(self) -> str:
        """Name of this kind of tokenizer in a dataset's description."""
        ...

    @property
    def vocab(self) -> int:
        """Vocabulary size: every token id is below it."""
        ...

    @property
    def eod(self) -> int | None:
        """Id of the end-of-document token, if the vocabulary has one."""
        ...

    @property
    def digest(self) -> str:
        """Digest of the tokenizer; equal digests give equal token ids for equal text."""
        ...

    @property
    def special(self) -> Mapping[str, str]:
        """Texts of special tokens by role, such as eos_token, for chat templates."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the tokenizer's own chat template, if it has one."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode a text to token ids, without adding special tokens."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode several texts; return the token ids of each."""
        ...

    def encode_with_offsets(self, texts: Sequence[str]) -> list[TokensWithOffsets]:
        """Encode to token ids with character offsets; spelled-out special tokens become tokens."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode token ids to text."""
        ...

    def save(self, directory: Path) -> tuple[str, ...]:
        """Write the files that `load_tokenizer` reads; return their names, the main one first."""
        ...


class ByteTokenizer:
    """Tokenizer whose ids are UTF-8 bytes, and 256 for the end of a document."""

    kind = "bytes"
    vocab = 257
    eod = 256
    digest = "bytes"
    chat_template = None
    special: Mapping[str, str] = {"eos_token": "<|endoftext|>"}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[TokensWithOffsets]:
        mark = re.compile(re.escape(self.special["eos_token"]))
        return [
            encode_with_special_tokens(text, mark, lambda _: self.eod, self._encode_with_offsets)
            for text in texts
        ]

    def _encode_with_offsets(self, text: str) -> TokensWithOffsets:
        encoded = text.encode()
        begins = character_offsets(encoded)[1:] - 1
        return TokensWithOffsets(np.frombuffer(encoded, np.uint8), begins, begins + 1)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text without 256; replace invalid UTF-8, which a model may generate."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def save(self, directory: Path) -> tuple[str, ...]:
        return ()


class SentencePieceTokenizer:
    """Sentencepiece model; `eod` is its end-of-sentence piece, unless another is named.

    Raises:
        DataError: the bytes are not a sentencepiece model, or it has no piece `eod`.
    """

    kind = "sentencepiece"
    chat_template = None  # a template file next to the model must be named by its path

    def __init__(self, model: bytes, name: str = "tokenizer.model", eod: str | None = None) -> None:
        import sentencepiece

        self._model, self._name, self._end = model, name, eod
        self._processor: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise DataError(f"{name}: not a sentencepiece model ({error})") from None
        self._words: WordCache | None = None
        self.vocab: int = self._processor.vocab_size()
        end = self._processor.eos_id() if eod is None else self._processor.piece_to_id(eod)
        if (
            eod is not None and self._processor.id_to_piece(end) != eod
        ):  # unknown pieces map to <unk>
            raise DataError(f"{name}: has no piece {eod!r}; name another one with --eod-token")
        self.eod: int | None = end if end >= 0 else None
        self.digest = hashlib.sha256(model).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return SentencePieceTokenizer, (self._model, self._name, self._end)

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        if self._words is None and (expression := context_free_pattern(self._model)):
            encode = partial(self._processor.encode, num_threads=1)
            self._words = WordCache(
                WORDS_PATTERN,
                encode,
                WORD_PARTS_PATTERN if expression is WORD_PARTS_PATTERN else None,
            )
        if self._words is not None:
            return self._words.encode(texts)
        # One thread: parallelism comes from worker processes.
        encoded = self._processor.encode(list(texts), num_threads=1)
        return [np.array(tokens, np.int32) for tokens in encoded]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[TokensWithOffsets]:
        number = self._processor.piece_to_id
        return [
            encode_with_special_tokens(
                text, self._control_pieces, number, self._encode_with_offsets
            )
            for text in texts
        ]

    @property
    def special(self) -> Mapping[str, str]:
        named = ("bos_token", self._processor.bos_id()), ("eos_token", self.eod)
        return {
            name: self._processor.id_to_piece(number)
            for name, number in named
            if number is not None and number >= 0
        }

    @cached_property
    def _control_pieces(self) -> re.Pattern[str]:
        """Pattern of the control pieces, which sentencepiece never produces from text."""
        numbers = filter(self._processor.is_control, range(self.vocab))
        pieces = sorted(map(self._processor.id_to_piece, numbers), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, pieces)) or "(?!)")

    def _encode_with_offsets(self, text: str) -> TokensWithOffsets:
        from sentencepiece import sentencepiece_pb2

        proto: Any = sentencepiece_pb2  # its classes are created at import
        encoded = self._processor.encode(text, out_type="serialized_proto")
        pieces = proto.SentencePieceText.FromString(encoded).pieces
        begins = np.array([piece.begin for piece in pieces], np.int64)
        ends = np.array([piece.end for piece in pieces], np.int64)
        for index in reversed(range(len(pieces) - 1)):
            if ends[index] == begins[index]:  # byte piece of a character, not its last one
                ends[index] = ends[index + 1]
        of = character_offsets(text.encode())
        return TokensWithOffsets(
            np.array([piece.id for piece in pieces], np.int32), of[begins], of[ends]
        )

    def decode(self, tokens: Iterable[int]) -> str:
        return self._processor.decode([int(token) for token in tokens])

    def save(self, directory: Path) -> tuple[str, ...]:
        path = directory / "tokenizer.model"
        with atomic_write(path) as file:
            file.write(self._model)
        return (path.name,)


def load_tokenizer(spec: str | Path, eod: str | None = None) -> Tokenizer:
    """Load a tokenizer.

    Args:
        spec: `bytes`, a sentencepiece FILE.model, a tokenizer.json, GPT-2's VOCAB.json,MERGES.txt,
            or a folder that contains one of these files.
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
        try:
            return SentencePieceTokenizer(path.read_bytes(), str(path), eod)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
    from graphtrain.data.tokenizers.huggingface import read_gpt2, read_huggingface

    vocab, comma, merges = str(path).partition(",")
    if comma:
        return read_gpt2(Path(vocab), Path(merges), eod)
    if path.suffix == ".json":
        return read_huggingface(path, eod)
    raise DataError(
        f"unknown tokenizer {str(spec)!r}; use bytes, FILE.model, tokenizer.json, "
        "VOCAB.json,MERGES.txt, a folder that contains one of them, or sentencepiece:VOCAB"
    )


def _tokenizer_in_folder(folder: Path) -> Path:
    """Return the path of the tokenizer in a folder, for example of a model."""
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).is_file():
            return folder / name
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return Path(f"{folder / 'vocab.json'},{folder / 'merges.txt'}")
    raise DataError(
        f"{folder}: contains no tokenizer.json, tokenizer.model, or vocab.json with merges.txt"
    )


def chat_template_of_config(config: bytes | str) -> str | None:
    """Return the chat template in a tokenizer_config.json; of several, the one named default.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: `config` is not a tokenizer_config.json.
    """
    found = json.loads(config).get("chat_template")
    if isinstance(found, list):
        return {each["name"]: each["template"] for each in found}.get("default")
    return found
