"""Scores of continuations: each is that of the text by itself, and what is shared is read once."""

import math

import numpy as np
import pytest
from toy_engine import ToyEngine

from graphtrain.run.evaluation.continuation_scores import ScoredText, score_continuations
from graphtrain.run.evaluation.packed_scores import score_texts
from graphtrain.run.evaluation.shared_prefixes import prefix_groups

SCORERS = {
    score_continuations: {"score_rows", "prefill", "copy"},
    score_texts: {"score_packed", "score_rows", "prefill", "copy"},
}


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


@pytest.mark.parametrize("score", SCORERS)
@pytest.mark.parametrize(
    ("slots", "window", "context", "longest"),
    [(4, None, 256, 60), (3, 8, 256, 60), (2, None, 48, 20), (1, 5, 48, 20), (4, 8, 256, 60)],
)
def test_each_score_is_that_of_its_text_alone(slots, window, context, longest, score):
    engine = ToyEngine(slots=slots, vocab=16, window=window, context_length=context, chunk=16)
    texts = random_texts(80, 16, longest)
    long = ScoredText(tuple(range(16)) * 2, 2)  # no call has room for it
    texts.append(long)
    got = dict(score(engine, texts))
    assert sorted(got) == list(range(len(texts)))
    for index, text in enumerate(texts):
        log_prob, is_greedy = alone(engine, text)
        assert math.isclose(got[index].log_prob, log_prob)
        assert got[index].is_greedy == is_greedy
    assert {name for name, _ in engine.calls} <= SCORERS[score]


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


def test_questions_of_a_subject_are_packed_after_its_examples_which_are_read_once():
    engine = ToyEngine(slots=1, context_length=256, chunk=32)
    subjects = [tuple(range(begin, begin + 100)) for begin in (0, 100)]
    texts = [
        ScoredText((7, *examples, 200 + question, 9, letter), 103)
        for examples in subjects
        for question in range(20)
        for letter in range(4)
    ]
    assert len(dict(score_texts(engine, texts))) == len(texts)
    by_name = {
        name: [tokens for called, tokens in engine.calls if called == name]
        for name in ("prefill", "score_packed")
    }
    assert sum(by_name["prefill"]) == 2 * 101 - 1  # the first token is that of both subjects
    assert sum(by_name["score_packed"]) == 40 * 2
    assert len(by_name["score_packed"]) == 2 * 3  # 4 targets of each question, 32 of a call


def test_answers_of_several_tokens_are_branches_of_their_question():
    engine = ToyEngine(slots=1, vocab=64, chunk=64)
    texts = [ScoredText((*range(20), *[letter] * 5), 20) for letter in range(30, 34)]
    assert len(dict(score_texts(engine, texts))) == 4
    assert engine.calls == [("score_packed", 20 + 4 * 4)]


def test_a_prefix_is_computed_once_for_the_group_that_gains_most_by_it():
    first, second = ((1, *[subject] * 98) for subject in (2, 3))
    few = [(1, 1, *[9] * 50, index) for index in range(2)]
    contexts = sorted([(*few[0], 8), (*few[1], 8)] + [
        (*subject, question, 4) for subject in (first, second) for question in range(10)
    ])  # fmt: skip
    groups = list(prefix_groups(contexts, [len(one) for one in contexts], 8))
    assert groups == [(52, range(2)), (99, range(2, 12)), (99, range(12, 22))]
    assert list(prefix_groups([(1, 2), (1, 3)], [2, 2], 8)) == [(0, range(2))]


def test_more_targets_of_one_token_than_a_call_has_room_for_take_several():
    engine = ToyEngine(slots=2, vocab=64, chunk=16)
    texts = [ScoredText((3, 4, token), 2) for token in range(40)]
    got = dict(score_continuations(engine, texts))
    assert [got[index].log_prob for index in range(40)] == [alone(engine, one)[0] for one in texts]
