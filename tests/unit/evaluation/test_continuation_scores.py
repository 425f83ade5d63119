"""Scores of continuations: each is that of the text by itself, and what is shared is read once."""

import math

import numpy as np
import pytest
from toy_engine import ToyEngine

from graphtrain.run.evaluation.continuation_scores import ScoredText, score_continuations


def alone(engine: ToyEngine, text: ScoredText) -> tuple[float, bool]:
    """Score of a text by an engine that has no window, from what the window would see."""
    log_prob, is_greedy = 0.0, True
    for index in range(text.begin, len(text.tokens)):
        before = text.tokens[:index]
        seen = before if engine.window is None else before[-engine.window :]
        choice = engine._choice(text.tokens[index], seen, None)
        log_prob, is_greedy = (
            log_prob + choice.log_prob,
            is_greedy and choice.token == choice.top[0][0],
        )
    return log_prob, is_greedy


def random_texts(count: int, vocab: int, longest: int) -> list[ScoredText]:
    """Texts of which many begin alike: with one of a few beginnings, and one of a few contexts."""
    random = np.random.default_rng(0)

    def words(most: int) -> tuple[int, ...]:
        return tuple(random.integers(0, vocab, random.integers(1, most)).tolist())

    beginnings = [(), words(longest), words(longest)]
    contexts = [beginnings[random.integers(3)] + words(longest) for _ in range(count // 4)]
    texts = []
    for _ in range(count):
        context, end = contexts[random.integers(len(contexts))], words(6)
        texts.append(ScoredText((*context, *end), len(context)))
    return [*texts, texts[3]]  # asked for twice


@pytest.mark.parametrize(
    ("slots", "window", "context", "longest"),
    [(4, None, 256, 60), (3, 8, 256, 60), (2, None, 48, 20), (1, 5, 48, 20)],
)
def test_each_score_is_that_of_its_text_alone(slots, window, context, longest):
    engine = ToyEngine(slots=slots, vocab=16, window=window, context_length=context, chunk=16)
    texts = random_texts(80, 16, longest)
    got = dict(score_continuations(engine, texts))
    assert sorted(got) == list(range(len(texts)))
    for index, text in enumerate(texts):
        log_prob, is_greedy = alone(engine, text)
        assert math.isclose(got[index].log_prob, log_prob)
        assert got[index].is_greedy == is_greedy
    assert {name for name, _ in engine.calls} <= {"score_rows", "prefill", "copy"}


def test_letters_of_a_question_are_one_call_for_as_many_questions_as_there_are_slots():
    engine = ToyEngine(slots=4, vocab=64)
    texts = [
        ScoredText((question, 9, letter), 2) for question in range(4) for letter in range(5, 9)
    ]
    assert len(dict(score_continuations(engine, texts))) == 16
    assert engine.calls == [("score_rows", 4)]


def test_examples_that_questions_share_are_read_once_and_copied():
    engine = ToyEngine(slots=4, context_length=256, chunk=32)
    examples = tuple(range(100, 200))
    texts = [ScoredText((*examples, question, 7), 101) for question in range(8)]
    assert len(dict(score_continuations(engine, texts))) == 8
    names = [name for name, _ in engine.calls]
    assert sum(tokens for name, tokens in engine.calls if name == "prefill") <= len(examples)
    assert names.count("copy") == 3
    assert names.count("score_rows") <= 5


def test_more_targets_of_one_token_than_a_call_has_room_for_take_several():
    engine = ToyEngine(slots=2, vocab=64, chunk=16)
    texts = [ScoredText((3, 4, token), 2) for token in range(40)]
    got = dict(score_continuations(engine, texts))
    assert [got[index].log_prob for index in range(40)] == [alone(engine, one)[0] for one in texts]
