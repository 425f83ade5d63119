"""Tokenizer of characters, whose vocabulary is that of a training text."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from graphtrain.data.tokenizers.offsets import TokensWithOffsets, encode_with_special_tokens
from graphtrain.errors import DataError
from graphtrain.files import atomic_write
from sharding_rules.documents import DocumentError, parse_object

SUFFIX = ".chars"
MAX_CHARACTERS = 10_000  # far more than any one script but that of all Chinese characters
_UNKNOWN = "\ufffd"  # Unicode's own replacement character


class CharacterTokenizer:
    """Tokenizer whose ids are the characters of a text, in the order of their code points.

    Two more ids follow: the end of a document, and every character that the text does not have.

    Args:
        content: Content of the file, as `save` writes it.
        name: Path for error messages.

    Raises:
        DataError: the content is not that of such a file.
    """

    kind = "chars"
    bos = None
    prefix = suffix = ()
    chat_template = None
    special: Mapping[str, str] = {"eos_token": "<|endoftext|>"}
    special_texts = ("<|endoftext|>",)

    def __init__(self, content: bytes, name: str = f"tokenizer{SUFFIX}") -> None:
        self._content = content
        try:
            characters = parse_object(content)["characters"]
            points = [ord(character) for character in characters]
        except (DocumentError, KeyError, TypeError) as error:
            raise DataError(f"{name}: not a tokenizer of characters ({error})") from None
        if not points or points != sorted({*points} - {ord(_UNKNOWN)}):
            raise DataError(
                f"{name}: not a tokenizer of characters (they are not in order, or repeat)"
            )
        self._points = np.array(points, np.uint32)
        self._texts = [*characters, "", _UNKNOWN]
        self.eod = len(points)
        self.vocab = len(points) + 2
        self.digest = hashlib.sha256(content).hexdigest()

    def __reduce__(self) -> tuple[type["CharacterTokenizer"], tuple[bytes]]:
        return CharacterTokenizer, (self._content,)

    def encode(self, text: str) -> list[int]:
        return self._ids(text).tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self._ids(text) for text in texts]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[TokensWithOffsets]:
        eos_pattern = re.compile(re.escape(*self.special_texts))
        return [
            encode_with_special_tokens(
                text, eos_pattern, lambda _: self.eod, self._encode_with_offsets
            )
            for text in texts
        ]

    def _encode_with_offsets(self, text: str) -> TokensWithOffsets:
        starts = np.arange(len(text))
        return TokensWithOffsets(self._ids(text), starts, starts + 1)

    def _ids(self, text: str) -> np.ndarray:
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        ids = np.minimum(np.searchsorted(self._points, points), len(self._points) - 1)
        return np.where(self._points[ids] == points, ids, self.vocab - 1).astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text without ends of documents."""
        return "".join(self._texts[token] for token in tokens)

    def piece_bytes(self, token: int) -> bytes | None:
        return None

    def save(self, directory: Path) -> tuple[str, ...]:
        name = f"tokenizer{SUFFIX}"
        with atomic_write(directory / name) as file:
            file.write(self._content)
        return (name,)


def train_characters(texts: Iterable[str]) -> CharacterTokenizer:
    """Return the tokenizer of the characters of the texts.

    Raises:
        DataError: there are no characters, or more than MAX_CHARACTERS.
    """
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    characters.discard(_UNKNOWN)
    if not characters:
        raise DataError("--tokenizer chars: the training text is empty; give files with text")
    if len(characters) > MAX_CHARACTERS:
        raise DataError(
            f"--tokenizer chars: the training text has {len(characters):,} different characters, "
            f"more than {MAX_CHARACTERS:,}; use --tokenizer bytes or sentencepiece:VOCAB"
        )
    content = json.dumps({"characters": "".join(sorted(characters))})
    return CharacterTokenizer(content.encode())
