"""Log-probabilities of continuations: what texts share is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from graphtrain.run.serving.engine_protocol import Engine, TokenChoice


@dataclass(frozen=True)
class ScoredText:
    """A text, the end of which is scored."""

    tokens: tuple[int, ...]
    begin: int  # index of the first token to score, at least 1


@dataclass(frozen=True)
class ContinuationScore:
    """Log-probability of the end of a text."""

    log_prob: float
    is_greedy: bool  # every token is the most likely one


def score_continuations(
    engine: Engine, texts: Sequence[ScoredText]
) -> Iterator[tuple[int, ContinuationScore]]:
    """Yield the index and the score of each text, in the order in which they are computed.

    Texts are sorted by their tokens, so that each one continues the KV cache of the one before,
    from where they differ. Texts that differ in the last token alone, as the letters of a
    multiple-choice question, are one call.

    Raises:
        UserError: a text could not be computed.
    """
    order = sorted(range(len(texts)), key=lambda index: _shared(texts[index]))
    for _, group in groupby(order, key=lambda index: _shared(texts[index])):
        indices = list(group)
        text = texts[indices[0]]
        choices = _scored(engine, text.tokens, text.begin)
        for index in indices:
            last = _last_choice(engine, texts[index].tokens, choices[-1])
            yield index, _total([*choices[:-1], last])


def _shared(text: ScoredText) -> tuple[tuple[int, ...], int]:
    return text.tokens[:-1], text.begin


def _last_choice(engine: Engine, tokens: tuple[int, ...], like: TokenChoice) -> TokenChoice:
    """Return the choice of the last token, where that of another token is known."""
    token = tokens[-1]
    if token == like.token:
        return like
    if token in (known := dict(like.top)):
        return TokenChoice(token, known[token], like.top)
    return _scored(engine, tokens, len(tokens) - 1)[0]


def _scored(engine: Engine, tokens: tuple[int, ...], begin: int) -> list[TokenChoice]:
    return [choice for choice in engine.score(tokens, begin) if choice is not None]


def _total(choices: Sequence[TokenChoice]) -> ContinuationScore:
    is_greedy = all(choice.token == choice.top[0][0] for choice in choices)
    return ContinuationScore(sum(choice.log_prob for choice in choices), is_greedy)
