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
        found = []
        for begin, end in parts:
            inside = np.flatnonzero((self.begins < end) & (self.ends > begin))
            if inside.size:
                found.append((int(inside[0]), int(inside[-1]) + 1))
        return found


def character_offsets(text: bytes) -> np.ndarray:
    """Return, for each byte offset of UTF-8 text, the number of characters that begin before it."""
    begins = (np.frombuffer(text, np.uint8) & 0xC0) != 0x80
    return np.concatenate([[0], np.cumsum(begins)])


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
    parts: list[TokensWithOffsets] = []
    at = 0
    for match in [*marks.finditer(text), None]:
        begin = match.start() if match else len(text)
        if begin > at:
            found = encode(text[at:begin])
            parts.append(TokensWithOffsets(found.tokens, found.begins + at, found.ends + at))
        if match:
            at = match.end()
            parts.append(
                TokensWithOffsets(*(np.array([n]) for n in (number(match.group()), begin, at)))
            )
    if not parts:
        return TokensWithOffsets(*(np.empty(0, np.int32) for _ in range(3)))
    return TokensWithOffsets(*map(np.concatenate, zip(*parts, strict=True)))
