"""Beam search: the sequences of a prompt with the highest log-probability.

As `transformers` 5 does it by default: running beams and finished ones are kept apart, the score of
a finished one is divided by a power of its length, and the search ends when the best running beam,
scored at its present length, is no better than the worst of the finished ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from graphtrain.errors import GraphtrainError


class BeamEngine(Protocol):
    """Engine with a program for beam search; for the other methods see `Engine`."""

    @property
    def beams(self) -> int:
        """Number of beams that one call continues."""
        ...

    @property
    def context_length(self) -> int: ...

    @property
    def chunk(self) -> int: ...

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> object: ...

    def decode_beams(
        self, parents: Sequence[int], tokens: Sequence[int], position: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Process one token of each beam; return the tokens that are most likely to follow.

        Args:
            parents: Slot whose KV cache each beam continues. Afterwards beam i is in slot i.
            tokens: Token of each beam, at most `beams`.
            position: Its position, the same for all.

        Returns:
            Tokens and their log-probabilities by beam, in descending order: 2 x `beams` of each
            beam, or the whole vocabulary.
        """
        ...


@dataclass(frozen=True)
class Beam:
    """Continuation of a prompt."""

    tokens: tuple[int, ...] = ()
    log_prob: float = 0.0  # of all its tokens together
    parent: int = 0  # index of the beam that it continues, without its last token

    def score(self, length_penalty: float) -> float:
        """Return the log-probability over the number of tokens to the power of length_penalty."""
        return self.log_prob / len(self.tokens) ** length_penalty


@dataclass(frozen=True, kw_only=True)
class BeamSettings:
    """Settings of a beam search."""

    beams: int
    length_penalty: float  # exponent of the length by which log-probabilities are divided

    def __post_init__(self) -> None:
        """Check the ranges; the comparisons are written so that NaN fails them.

        Raises:
            GraphtrainError: a value is outside of its range.
        """
        if not self.beams >= 2:
            raise GraphtrainError(f"beams = {self.beams}: must be at least 2")
        if not math.isfinite(self.length_penalty):
            raise GraphtrainError(f"length_penalty = {self.length_penalty}: must be finite")


def beam_search(
    engine: BeamEngine,
    prompt: Sequence[int],
    settings: BeamSettings,
    max_tokens: int,
    has_ended: Callable[[Sequence[int]], bool],
) -> list[Beam]:
    """Return the best continuations of a prompt, `settings.beams` at most, best first.

    Args:
        engine: Engine that generates.
        prompt: Token ids, at least one.
        settings: How continuations are compared.
        max_tokens: Maximum number of tokens of a continuation.
        has_ended: Called with the tokens of a beam; returns whether it ends with the last one.

    Raises:
        GraphtrainError: prompt and continuation do not fit into the context.
    """
    _check_length(engine, prompt, max_tokens)
    for offset in range(0, len(prompt) - 1, engine.chunk):
        chunk = prompt[offset : min(offset + engine.chunk, len(prompt) - 1)]
        engine.prefill(0, chunk, offset)
    running, finished = [Beam()], list[Beam]()
    while running and not _is_decided(running, finished, settings):
        position = len(prompt) - 1 + len(running[0].tokens)
        tokens, log_probs = engine.decode_beams(
            [beam.parent for beam in running],
            [beam.tokens[-1] if beam.tokens else prompt[-1] for beam in running],
            position,
        )
        candidates = _candidates(running, tokens, log_probs, 2 * settings.beams)
        is_last = len(candidates[0].tokens) == max_tokens
        ends = [is_last or has_ended(beam.tokens) for beam in candidates]
        running, ended = _divide(candidates, ends, settings.beams)
        finished = _best([*finished, *ended], settings)
    return finished


def _check_length(engine: BeamEngine, prompt: Sequence[int], max_tokens: int) -> None:
    if not prompt:
        raise GraphtrainError("the prompt is empty, so there is nothing to continue")
    if not max_tokens >= 1:
        raise GraphtrainError(f"max_tokens = {max_tokens}: must be at least 1")
    # The last token that is generated has no place in the KV cache.
    if len(prompt) + max_tokens > engine.context_length + 1:
        raise GraphtrainError(
            f"the prompt of {len(prompt)} tokens and {max_tokens} new ones do not fit "
            f"into the context of {engine.context_length}, beyond which a beam search does not go; "
            "lower --tokens (max_tokens), or raise program.serve.context_length"
        )


def _candidates(
    running: Sequence[Beam], tokens: np.ndarray, log_probs: np.ndarray, count: int
) -> list[Beam]:
    """Return the continuations of all beams by one token with the highest log-probability."""
    totals = log_probs + np.array([beam.log_prob for beam in running], np.float32)[:, None]
    order = np.argsort(-totals, axis=None, kind="stable")[:count]
    return [
        Beam((*running[row].tokens, int(tokens[row, column])), float(totals[row, column]), int(row))
        for row, column in zip(*np.unravel_index(order, totals.shape), strict=True)
        if np.isfinite(totals[row, column])  # or else the tokenizer does not have the token
    ]


def _divide(
    candidates: Sequence[Beam], ends: Sequence[bool], beams: int
) -> tuple[list[Beam], list[Beam]]:
    """Return the candidates that go on, and those that ended.

    A beam that ended counts only if it is among the best `beams` candidates; the others are there
    so that enough go on.
    """
    marked = list(zip(candidates, ends, strict=True))
    ended = [beam for beam, ends in marked[:beams] if ends]
    return [beam for beam, ends in marked if not ends][:beams], ended


def _best(finished: Sequence[Beam], settings: BeamSettings) -> list[Beam]:
    order = sorted(finished, key=lambda beam: -beam.score(settings.length_penalty))
    return order[: settings.beams]


def _is_decided(running: Sequence[Beam], finished: Sequence[Beam], settings: BeamSettings) -> bool:
    """Return whether no running beam is likely to be better than the finished ones."""
    if len(finished) < settings.beams:
        return False
    penalty = settings.length_penalty
    return running[0].score(penalty) <= finished[-1].score(penalty)
