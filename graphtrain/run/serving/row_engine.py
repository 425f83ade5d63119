"""Interface of an engine that continues many slots by given tokens, and scores what may follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from graphtrain.run.serving.engine_protocol import Engine


@dataclass(frozen=True)
class RowTokens:
    """New tokens of one slot, and the tokens that are scored after them."""

    tokens: Sequence[int]  # none: the slot is not continued
    offset: int  # position of the first of them
    targets: Sequence[tuple[int, int]] = ()  # index in `tokens`, and a token that may follow it


@dataclass(frozen=True)
class PackedRow:
    """Tokens of many texts after the same prefix, and the tokens that are scored after them."""

    tokens: list[int]
    positions: list[int]  # of each of them in its text, the prefix included
    texts: list[int]  # number of the text of each
    branches: list[int]  # 0: the trunk of its text; else which branch after the trunk
    targets: list[tuple[int, int]]  # index in `tokens`, and a token that may follow it


@dataclass(frozen=True)
class TargetScore:
    """Log-probability of a token after those before it."""

    log_prob: float
    is_likeliest: bool


class RowEngine(Engine, Protocol):
    """Engine with programs that score tokens in all slots at once."""

    @property
    def row_sizes(self) -> Sequence[int]:
        """Numbers of tokens of each slot that a call may process, in increasing order."""
        ...

    @property
    def call_tokens(self) -> int:
        """Number of tokens whose computation takes as long as a call does beside them."""
        ...

    def score_rows(self, rows: Sequence[RowTokens], size: int) -> list[list[TargetScore]]:
        """Process tokens into the KV caches of all slots; return the scores of their targets.

        Every slot writes `size` positions from its offset on, also one that is not continued: what
        it holds there is lost. No slot may reach beyond context_length + row_sizes[0].

        Args:
            rows: For each slot at most `size` tokens, and at most as many targets.
            size: One of row_sizes.

        Raises:
            UserError: the logits are not finite.
        """
        ...

    @property
    def packed_rows(self) -> int:
        """Number of rows of packed texts in a call; row i continues what slot i holds."""
        ...

    @property
    def packed_sizes(self) -> Sequence[int]:
        """Numbers of tokens of each row that a call may process, in increasing order."""
        ...

    def score_packed(
        self, rows: Sequence[PackedRow], prefix: int, size: int
    ) -> list[list[TargetScore]]:
        """Return the scores of the targets of packed texts; the slots hold what they held.

        Args:
            rows: For each row at most `size` tokens, and at most as many targets.
            prefix: Number of tokens of the slots that the texts continue.
            size: One of packed_sizes.

        Raises:
            UserError: the logits are not finite.
        """
        ...
