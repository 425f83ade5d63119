"""Log-probabilities of many texts in one call: what they share is computed once, nothing is copied.

Texts that begin alike, as the questions of a subject after the same examples, share a prefix in the
KV cache. The rest of them is packed: one question after the other in a call, each followed by its
continuations, which are branches of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from graphtrain.run.evaluation.continuation_scores import (
    ContinuationScore,
    ScoredText,
    common_length,
    score_continuations,
)
from graphtrain.run.evaluation.shared_prefixes import prefix_groups
from graphtrain.run.serving.prefill_sizes import next_size
from graphtrain.run.serving.row_engine import PackedRow, RowEngine, TargetScore

_End = tuple[int, tuple[int, ...]]  # index of a text, and its continuation


@dataclass(frozen=True)
class _Piece:
    """Tokens after a prefix, and continuations of them."""

    trunk: tuple[int, ...]
    ends: tuple[_End, ...]

    @property
    def tokens(self) -> int:
        return len(self.trunk) + sum(len(end) - 1 for _, end in self.ends)

    @property
    def size(self) -> int:
        """Number of tokens, or of targets, whichever is larger."""
        return max(self.tokens, sum(len(end) for _, end in self.ends))


def score_texts(
    engine: RowEngine, texts: Sequence[ScoredText]
) -> Iterator[tuple[int, ContinuationScore]]:
    """Yield the index and the score of each text, as they are computed.

    Raises:
        UserError: a text could not be computed.
    """
    room = engine.packed_sizes[-1]
    packed = [index for index, text in enumerate(texts) if len(text.end) <= room]
    yield from _Packed(engine).scores({index: texts[index] for index in packed})
    others = [index for index, text in enumerate(texts) if len(text.end) > room]
    for at, score in score_continuations(engine, [texts[index] for index in others]):
        yield others[at], score


class _Packed:
    """An engine, and the prefix that its slots hold."""

    def __init__(self, engine: RowEngine) -> None:
        self._engine = engine
        self._room = engine.packed_sizes[-1]
        self._held: tuple[int, ...] = ()  # in slot 0
        self._copied: tuple[int, ...] = ()  # in the other slots of the rows

    def scores(self, texts: dict[int, ScoredText]) -> Iterator[tuple[int, ContinuationScore]]:
        order = sorted(texts, key=lambda index: (texts[index].context, texts[index].end))
        questions = [
            (context, tuple((index, texts[index].end) for index in indices))
            for context, indices in groupby(order, key=lambda index: texts[index].context)
        ]
        contexts = [context for context, _ in questions]
        sizes = [_Piece(*question).tokens for question in questions]
        for prefix, members in prefix_groups(contexts, sizes, self._engine.call_tokens):
            pieces, long = [], []
            for context, ends in questions[members.start : members.stop]:
                piece = _Piece(context[prefix:], ends)
                (pieces if piece.size <= self._room else long).append(piece)
            shared = contexts[members.start][:prefix]
            yield from self._score(shared, pieces)
            for piece in long:  # its context is a prefix of its own
                before = (*shared, *piece.trunk[:-1])
                yield from self._score(before, tuple(_divided(piece, self._room)))

    def _score(
        self, prefix: tuple[int, ...], pieces: Sequence[_Piece]
    ) -> Iterator[tuple[int, ContinuationScore]]:
        """Yield the scores of pieces that continue the same prefix."""
        left = sorted(pieces, key=lambda piece: piece.size)
        if left:
            self._hold(prefix)
        while left:
            capacity = self._capacity(left)
            rows = [_take(left, capacity) for _ in range(self._engine.packed_rows)]
            packed = [_packed_row(row, len(prefix)) for row in rows]
            scores = self._engine.score_packed(packed, len(prefix), capacity)
            for row, scored in zip(rows, scores, strict=True):
                yield from _scores_of(row, scored)

    def _capacity(self, left: Sequence[_Piece]) -> int:
        """Return the size of the next call: the cheapest for what is left that has room for it."""
        sizes, rows = self._engine.packed_sizes, self._engine.packed_rows
        count = -(-sum(piece.size for piece in left) // rows)
        call_tokens = -(-self._engine.call_tokens // rows)
        wanted = next_size(count, count + sizes[-1], tuple(sizes), call_tokens)
        return next(size for size in sizes if size >= max(wanted, left[-1].size))

    def _hold(self, prefix: tuple[int, ...]) -> None:
        """Put a prefix into the slots of all rows; what slot 0 holds of it stays."""
        engine = self._engine
        begin = common_length(self._held, prefix)
        if not engine.can_reuse(0, begin):
            begin = 0
        self._held = self._held if begin == len(prefix) else prefix
        while begin < len(prefix):
            part = prefix[begin : begin + engine.chunk]
            engine.prefill(0, part, begin)
            begin += len(part)
        others = range(1, engine.packed_rows)
        copied = common_length(self._copied, prefix)
        if copied < len(prefix) or not all(engine.can_reuse(slot, copied) for slot in others):
            for slot in others:
                engine.copy_prefix(0, slot, len(prefix))
            self._copied = prefix


def _divided(piece: _Piece, room: int) -> Iterator[_Piece]:
    """Yield a piece in parts of so much room, each after the last token of its trunk alone."""
    trunk, ends, size = piece.trunk[-1:], [], 0
    for index, end in piece.ends:
        if size + len(end) > room:
            yield _Piece(trunk, tuple(ends))
            ends, size = [], 0
        ends.append((index, end))
        size += len(end)
    yield _Piece(trunk, tuple(ends))


def _take(left: list[_Piece], room: int) -> list[_Piece]:
    """Remove the pieces for a row from a list that is sorted by size: the largest that fit."""
    taken: list[_Piece] = []
    while (at := bisect_right(left, room, key=lambda piece: piece.size) - 1) >= 0:
        taken.append(left.pop(at))
        room -= taken[-1].size
    return taken


def _packed_row(pieces: Sequence[_Piece], prefix: int) -> PackedRow:
    row = PackedRow([], [], [], [], [])

    def add(tokens: Sequence[int], begin: int, text: int, branch: int) -> int:
        """Add tokens from a position on; return the index of the first of them."""
        first = len(row.tokens)
        row.tokens.extend(tokens)
        row.positions.extend(range(begin, begin + len(tokens)))
        row.texts.extend([text] * len(tokens))
        row.branches.extend([branch] * len(tokens))
        return first

    for text, piece in enumerate(pieces):
        trunk_end = add(piece.trunk, prefix, text, 0) + len(piece.trunk) - 1
        for branch, (_, end) in enumerate(piece.ends, 1):
            begin = add(end[:-1], prefix + len(piece.trunk), text, branch)
            after = [trunk_end, *range(begin, begin + len(end) - 1)]
            row.targets.extend(zip(after, end, strict=True))
    return row


def _scores_of(
    pieces: Sequence[_Piece], scores: Sequence[TargetScore]
) -> Iterator[tuple[int, ContinuationScore]]:
    """Yield the scores of a row's texts, from those of its targets in the order of _packed_row."""
    following = iter(scores)
    for piece in pieces:
        for index, end in piece.ends:
            own = [next(following) for _ in end]
            log_prob = sum(score.log_prob for score in own)
            yield index, ContinuationScore(log_prob, all(score.is_likeliest for score in own))
