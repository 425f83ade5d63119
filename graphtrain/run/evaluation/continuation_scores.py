"""Log-probabilities of long continuations, in all slots of an engine.

These are texts that `packed_scores` has no room for, as the windows of a perplexity are.
The texts of one question have the same context. A question is in one slot: its context is computed
once, then each continuation in turn, in place of the one before. Every slot has another question.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from graphtrain.run.serving.row_engine import RowEngine, RowTokens, TargetScore
from graphtrain.run.serving.slots import MIN_COPY, Slots

_WORSE = 0.5  # gain of a call for all slots, as a part of that for one, below which it is worse


@dataclass(frozen=True)
class ScoredText:
    """A text, the end of which is scored."""

    tokens: tuple[int, ...]
    begin: int  # index of the first token to score, at least 1

    @property
    def context(self) -> tuple[int, ...]:
        return self.tokens[: self.begin]

    @cached_property
    def end(self) -> tuple[int, ...]:
        return self.tokens[self.begin :]


@dataclass(frozen=True)
class ContinuationScore:
    """Log-probability of the end of a text."""

    log_prob: float
    is_greedy: bool  # every token is the most likely one


def score_continuations(
    engine: RowEngine, texts: Sequence[ScoredText]
) -> Iterator[tuple[int, ContinuationScore]]:
    """Yield the index and the score of each text, as they are computed.

    Raises:
        UserError: a text could not be computed.
    """
    order = sorted(range(len(texts)), key=lambda index: (texts[index].context, texts[index].end))
    questions = deque(
        _Question(context, [(index, texts[index].end) for index in indices])
        for context, indices in groupby(order, key=lambda index: texts[index].context)
    )
    rows = _Rows(engine)
    while questions or rows.busy:
        while questions and rows.start(questions[0]):
            questions.popleft()
        rows.advance()
        yield from rows.finished()


class _Question:
    """Continuations of one context, and the scores of their tokens as far as they are known.

    Attributes:
        context: Tokens before all continuations.
    """

    def __init__(self, context: tuple[int, ...], ends: list[tuple[int, tuple[int, ...]]]) -> None:
        self.context, self._ends = context, deque(ends)
        self._scores: dict[tuple[tuple[int, ...], int], TargetScore] = {}
        self._missing: dict[tuple[int, ...], dict[int, None]] = {}  # tokens after each beginning
        for _, end in ends:
            for index, token in enumerate(end):
                self._missing.setdefault(end[:index], {})[token] = None

    @property
    def inputs(self) -> tuple[int, ...]:
        """Tokens that have to be read for the next continuation."""
        return (*self.context, *self._ends[0][1][:-1])

    @property
    def first_position(self) -> int:
        """Position of the first token that has to be read for a score of the next continuation."""
        _, end = self._ends[0]
        known = ((end[:index], token) in self._scores for index, token in enumerate(end))
        return len(self.context) - 1 + next(index for index, found in enumerate(known) if not found)

    def targets(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the position and the token of each score that is missing at positions of `inputs`.

        These are scores of all continuations, which may begin like the next one.
        """
        inputs, length = self.inputs, len(self.context)
        return [
            (position, token)
            for position in range(max(begin, length - 1), end)
            for token in self._missing.get(inputs[length : position + 1], ())
        ]

    def add(self, position: int, token: int, score: TargetScore) -> None:
        """Record a score of `targets`."""
        beginning = self.inputs[len(self.context) : position + 1]
        self._scores[beginning, token] = score
        del self._missing[beginning][token]

    def finished(self) -> Iterator[tuple[int, ContinuationScore]]:
        """Remove and yield the continuations at the front whose scores are all known."""
        while self._ends:
            index, end = self._ends[0]
            keys = [(end[:at], token) for at, token in enumerate(end)]
            if not all(key in self._scores for key in keys):
                return
            scores = [self._scores[key] for key in keys]
            self._ends.popleft()
            yield (
                index,
                ContinuationScore(
                    sum(score.log_prob for score in scores),
                    all(score.is_likeliest for score in scores),
                ),
            )

    @property
    def is_finished(self) -> bool:
        return not self._ends


class _Rows:
    """Slots of an engine, and the question in each."""

    def __init__(self, engine: RowEngine) -> None:
        self._engine = engine
        self._slots = Slots(engine.slots, engine.can_reuse)
        self._held: list[tuple[int, ...]] = [()] * engine.slots  # tokens in the KV cache
        self._limit = engine.context_length + engine.row_sizes[0]  # of positions
        self.busy: dict[int, _Question] = {}

    def start(self, question: _Question) -> bool:
        """Give a question to a free slot; return whether there is one.

        Where another slot computes a longer prefix of it than any holds yet, it waits for it.
        """
        if not self._slots.free:
            return False
        wanted = question.context[:-1]
        held = max(common_length(tokens, wanted) for tokens in self._held)
        coming = (common_length(other.inputs, wanted) for other in self.busy.values())
        if max(coming, default=0) >= held + MIN_COPY:
            return False
        placement = self._slots.place(question.context)
        if placement.source != placement.slot:
            self._engine.copy_prefix(placement.source, placement.slot, placement.length)
        self._keep(placement.slot, question.context[: placement.length])
        self.busy[placement.slot] = question
        return True

    def advance(self) -> None:
        """Process the next tokens of all questions; of one, if there is little for the others."""
        begins = {slot: self._begin(slot) for slot in self.busy}
        left = {slot: len(self.busy[slot].inputs) - begin for slot, begin in begins.items()}
        sizes = [
            size
            for size in self._engine.row_sizes
            if all(begin + size <= self._limit for begin in begins.values())
        ]
        slots, call = self._engine.slots, self._engine.call_tokens

        def used(size: int) -> int:
            return sum(min(size, count) for count in left.values())

        def gain(size: int) -> float:
            return used(size) / (size * slots + call)

        size = max(sizes, key=gain)
        slot = max(left, key=lambda slot: left[slot])
        unscored = min(self.busy[slot].first_position - begins[slot], self._engine.chunk)
        if unscored and gain(size) < _WORSE * unscored / (unscored + call):
            self._prefill(slot, begins[slot], unscored)
        else:
            self._score(begins, size)

    def finished(self) -> Iterator[tuple[int, ContinuationScore]]:
        """Yield the scores that are complete, and free the slots of finished questions."""
        for slot, question in list(self.busy.items()):
            yield from question.finished()
            if question.is_finished:
                del self.busy[slot]
                self._slots.release(slot)

    def _begin(self, slot: int) -> int:
        """Return the position from which a question goes on."""
        question = self.busy[slot]
        shared = common_length(self._held[slot], question.inputs)
        begin = min(shared, question.first_position)
        return begin if self._engine.can_reuse(slot, begin) else 0

    def _prefill(self, slot: int, begin: int, count: int) -> None:
        tokens = self.busy[slot].inputs[: begin + count]
        self._engine.prefill(slot, tokens[begin:], begin)
        self._keep(slot, tokens)

    def _score(self, begins: dict[int, int], size: int) -> None:
        rows, wanted = [], {}
        for slot in range(self._engine.slots):
            if slot not in begins:
                self._keep(slot, self._held[slot][: self._limit - size])
                rows.append(RowTokens((), len(self._held[slot])))
                continue
            question, begin = self.busy[slot], begins[slot]
            tokens = question.inputs[: begin + size]
            wanted[slot] = question.targets(begin, len(tokens))[:size]
            targets = [(position - begin, token) for position, token in wanted[slot]]
            rows.append(RowTokens(tokens[begin:], begin, targets))
            self._keep(slot, tokens)
        scores = self._engine.score_rows(rows, size)
        for slot, targets in wanted.items():
            for (position, token), score in zip(targets, scores[slot], strict=True):
                self.busy[slot].add(position, token, score)

    def _keep(self, slot: int, tokens: tuple[int, ...]) -> None:
        self._held[slot] = tokens
        self._slots.keep(slot, tokens)


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of tokens at the beginning that two sequences share."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))
