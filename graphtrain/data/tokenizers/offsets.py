"""Tokens with their places in a text, in characters."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Placed(NamedTuple):
    """The tokens of a text, and the characters that each comes from; some come from none."""

    tokens: np.ndarray
    begins: np.ndarray
    ends: np.ndarray

    def spans(self, parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Parts of the text as spans of tokens; a token that is partly inside counts."""
        found = []
        for begin, end in parts:
            inside = np.flatnonzero((self.begins < end) & (self.ends > begin))
            if inside.size:
                found.append((int(inside[0]), int(inside[-1]) + 1))
        return found


def characters(text: bytes) -> np.ndarray:
    """By byte of UTF-8, how many characters begin before it; one more than there are bytes."""
    begins = (np.frombuffer(text, np.uint8) & 0xC0) != 0x80
    return np.concatenate([[0], np.cumsum(begins)])


def between_marks(
    text: str, marks: re.Pattern[str], number: Callable[[str], int], encode: Callable[[str], Placed]
) -> Placed:
    """Encode what is between marks that are tokens, which their tokenizer takes for text."""
    parts: list[Placed] = []
    at = 0
    for match in [*marks.finditer(text), None]:
        begin = match.start() if match else len(text)
        if begin > at:
            found = encode(text[at:begin])
            parts.append(Placed(found.tokens, found.begins + at, found.ends + at))
        if match:
            at = match.end()
            parts.append(Placed(*(np.array([n]) for n in (number(match.group()), begin, at))))
    if not parts:
        return Placed(*(np.empty(0, np.int32) for _ in range(3)))
    return Placed(*map(np.concatenate, zip(*parts, strict=True)))
