"""Tokens with their offsets in a text, in characters."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class TokensWithOffsets(NamedTuple):
    """Tokens of a text and the character span of each, which may be empty."""

    tokens: np.ndarray
    begins: np.ndarray
    ends: np.ndarray

    def spans(self, parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Convert character spans to token spans, including tokens that are partly inside."""
        token_spans = []
        for start, end in parts:
            overlapping = np.flatnonzero((self.begins < end) & (self.ends > start))
            if overlapping.size:
                token_spans.append((int(overlapping[0]), int(overlapping[-1]) + 1))
        return token_spans


def character_offsets(text: bytes) -> np.ndarray:
    """Return, for each byte offset of UTF-8 text, the number of characters that begin before it."""
    is_start = (np.frombuffer(text, np.uint8) & 0xC0) != 0x80
    return np.concatenate([[0], np.cumsum(is_start)])


def encode_with_special_tokens(
    text: str,
    marks: re.Pattern[str],
    number: Callable[[str], int],
    encode: Callable[[str], TokensWithOffsets],
) -> TokensWithOffsets:
    """Encode a text in which special tokens are spelled out, for tokenizers that ignore them.

    Args:
        text: The text.
        marks: Pattern of the special tokens.
        number: Returns the id of a special token.
        encode: Encodes the text between special tokens.
    """
    segments: list[TokensWithOffsets] = []
    position = 0
    for match in [*marks.finditer(text), None]:
        start = match.start() if match else len(text)
        if start > position:
            encoded = encode(text[position:start])
            segments.append(
                TokensWithOffsets(
                    encoded.tokens, encoded.begins + position, encoded.ends + position
                )
            )
        if match:
            position = match.end()
            segments.append(
                TokensWithOffsets(
                    *(np.array([n]) for n in (number(match.group()), start, position))
                )
            )
    if not segments:
        return TokensWithOffsets(*(np.empty(0, np.int32) for _ in range(3)))
    return TokensWithOffsets(*map(np.concatenate, zip(*segments, strict=True)))
