"""Scores of continuations: each is that of the text by itself, and what is shared is one call."""

import math

import numpy as np
from toy_engine import ToyEngine

from graphtrain.run.evaluation.continuation_scores import ScoredText, score_continuations


def alone(engine: ToyEngine, text: ScoredText) -> tuple[float, bool]:
    choices = engine.score(text.tokens)[text.begin :]
    return sum(one.log_prob for one in choices), all(one.token == one.top[0][0] for one in choices)


def test_each_score_is_that_of_its_text_alone():
    engine = ToyEngine(vocab=16)
    random = np.random.default_rng(0)
    texts = []
    for _ in range(40):
        tokens = tuple(random.integers(0, 16, random.integers(2, 12)).tolist())
        texts.append(ScoredText(tokens, int(random.integers(1, len(tokens)))))
    texts.append(texts[3])  # asked for twice
    got = dict(score_continuations(engine, texts))
    assert sorted(got) == list(range(len(texts)))
    for index, text in enumerate(texts):
        log_prob, is_greedy = alone(engine, text)
        assert math.isclose(got[index].log_prob, log_prob)
        assert got[index].is_greedy == is_greedy


def test_texts_that_differ_in_the_last_token_are_one_call_if_it_is_a_likely_one():
    engine = ToyEngine(vocab=16)
    likely = [token for token, _ in engine.score([5, 6, 7])[-1].top]
    engine.calls.clear()
    texts = [ScoredText((5, 6, token), 2) for token in likely[:4]]
    assert len(dict(score_continuations(engine, texts))) == 4
    assert engine.calls == [("score", 3)]
