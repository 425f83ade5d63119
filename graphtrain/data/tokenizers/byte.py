"""Tokenizer of bytes, which needs no file."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from graphtrain.data.tokenizers.offsets import (
    TokensWithOffsets,
    character_offsets,
    encode_with_special_tokens,
)


class ByteTokenizer:
    """Tokenizer whose ids are UTF-8 bytes, and 256 for the end of a document."""

    kind = "bytes"
    vocab = 257
    eod = 256
    bos = None
    prefix = suffix = ()
    digest = "bytes"
    chat_template = None
    special: Mapping[str, str] = {"eos_token": "<|endoftext|>"}
    special_texts = ("<|endoftext|>",)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[TokensWithOffsets]:
        eos_pattern = re.compile(re.escape(*self.special_texts))
        return [
            encode_with_special_tokens(
                text, eos_pattern, lambda _: self.eod, self._encode_with_offsets
            )
            for text in texts
        ]

    def _encode_with_offsets(self, text: str) -> TokensWithOffsets:
        encoded = text.encode()
        starts = character_offsets(encoded)[1:] - 1
        return TokensWithOffsets(np.frombuffer(encoded, np.uint8), starts, starts + 1)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text without 256; replace invalid UTF-8, which a model may generate."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def piece_bytes(self, token: int) -> bytes | None:
        return bytes([token]) if token < 256 else None

    def save(self, directory: Path) -> tuple[str, ...]:
        return ()
