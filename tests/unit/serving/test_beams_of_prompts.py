"""Beam search over many prompts: what it finds, where it ends, and vocabularies smaller than it."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from graphtrain.data.prepare.chat_templates import find_template
from graphtrain.data.prepare.conversations import Conversation
from graphtrain.data.tokenizers.byte import ByteTokenizer
from graphtrain.run.batch_generation import Continuation, RequestEncoder, search_all
from graphtrain.run.prompt_file import Prompt
from graphtrain.run.serving.beam_search import BeamSettings
from graphtrain.run.serving.chat_format import chat_format
from graphtrain.run.serving.engine_protocol import SamplingParameters
from graphtrain.run.serving.sequence import SequenceRequest

TOKENIZER = ByteTokenizer()


@dataclass
class Bigrams:
    """Engine of beams whose next token depends on the last one; prompts are in slot 0."""

    table: np.ndarray  # log-probabilities, by the last token and the next one
    beams: int
    context_length: int = 64
    chunk: int = 4

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        assert slot == 0 and 0 < len(tokens) <= self.chunk

    def decode_beams(
        self, parents: Sequence[int], tokens: Sequence[int], position: int
    ) -> tuple[np.ndarray, np.ndarray]:
        assert len(parents) == len(tokens) <= self.beams and position < self.context_length
        rows = self.table[list(tokens)]
        order = np.argsort(-rows, axis=1, kind="stable")[:, : 2 * self.beams]
        return order, np.take_along_axis(rows, order, 1).astype(np.float32)


def table(vocab: int) -> np.ndarray:
    logits = np.random.default_rng(vocab).normal(size=(vocab, vocab))
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def request(prompt: Sequence[int], max_tokens: int, **options) -> SequenceRequest:
    stop = options.pop("stop", ())
    sampling = SamplingParameters(max_tokens=max_tokens, **options)
    return SequenceRequest(prompt=tuple(prompt), sampling=sampling, stop=stop)


def search(engine: Bigrams, asked: Sequence[SequenceRequest], count: int = 1, penalty: float = 1.0):
    settings = BeamSettings(beams=engine.beams, length_penalty=penalty)
    return list(search_all(engine, TOKENIZER, asked, settings, count))


def best_of_all(scores: np.ndarray, prompt: Sequence[int], length: int) -> list[float]:
    """Scores of all texts of a length, best first."""
    found = []
    for tokens in itertools.product(range(len(scores)), repeat=length):
        pairs = itertools.pairwise([prompt[-1], *tokens])
        found.append(sum(scores[before, after] for before, after in pairs) / length)
    return sorted(found, reverse=True)


@pytest.mark.parametrize("vocab", [2, 4])
def test_as_many_beams_as_texts_find_the_best_ones_though_tokens_are_fewer(vocab):
    engine = Bigrams(table(vocab), beams=vocab**4)
    prompts = [[1], [0, 1, 0, 0, 1, 0], [1, 1]]
    found = search(engine, [request(prompt, 4) for prompt in prompts], count=5)
    for prompt, continuations in zip(prompts, found, strict=True):
        assert [one.log_prob for one in continuations] == pytest.approx(
            best_of_all(engine.table, prompt, 4)[:5], abs=1e-6
        )
        assert {one.finish_reason for one in continuations} == {"length"}


def chain(text: bytes, doubt: float = 0.01) -> np.ndarray:
    """Bigrams of one text; each of its letters occurs once. Other tokens are unlikely."""
    scores = np.full((257, 257), math.log(doubt / 256))
    for before, after in itertools.pairwise(text):
        scores[before, after] = math.log(1 - doubt)
    return scores


def test_a_beam_ends_with_a_stop_token_or_with_a_string_that_tokens_divide():
    asked = request(b"a", 20, stop_tokens=(ord("e"),))
    ((answer,),) = search(Bigrams(chain(b"abcdefgh"), 3), [asked])
    assert (answer.text, answer.tokens, answer.finish_reason) == ("bcd", tuple(b"bcd"), "stop")
    assert answer.log_prob == pytest.approx(math.log(0.99), abs=1e-6)  # with the stop token
    asked = request(b"a", 20, stop=("ef",))
    ((answer,),) = search(Bigrams(chain(b"abcdefgh"), 3), [asked])
    assert (answer.text, answer.tokens, answer.finish_reason) == ("bcd", tuple(b"bcd"), "stop")


def test_a_conversation_is_answered_up_to_the_mark_of_its_template(tmp_path):
    (tmp_path / "marks.jinja").write_text(
        "{% for one in messages %}{{ one.content }}</s>\n{% endfor %}"
    )
    chat = chat_format(find_template(str(tmp_path / "marks.jinja"), TOKENIZER), TOKENIZER, ())
    conversation = Conversation(({"role": "user", "content": "Hi"},))
    encoder = RequestEncoder(TOKENIZER, (), lambda: chat, context_length=64)
    asked = encoder.request(Prompt(conversation, "f:1"), SamplingParameters(max_tokens=30))
    assert asked.stop == ("</s>",)  # several tokens of bytes
    ((answer,),) = search(Bigrams(chain(b"\nYep!</s>x"), 2), [asked])
    assert (answer.text, answer.finish_reason) == ("Yep!", "stop")


def test_the_exponent_of_the_length_prefers_longer_texts():
    scores = np.log(np.full((257, 257), 1e-6))
    scores[ord("a"), [ord("."), ord("b")]] = math.log(0.5), math.log(0.4)
    scores[ord("b"), ord("c")] = scores[ord("c"), ord(".")] = math.log(0.7)

    def text(penalty: float) -> Continuation:
        asked = request(b"a", 3, stop_tokens=(ord("."),))
        return search(Bigrams(scores, 2), [asked], penalty=penalty)[0][0]

    assert text(0.0).text == "" and text(0.0).log_prob == pytest.approx(math.log(0.5))
    expected = math.log(0.4 * 0.7 * 0.7) / 9
    assert text(2.0).text == "bc" and text(2.0).log_prob == pytest.approx(expected)
