"""Prompts of a file: what a line may be, and continuations in the order of the lines."""

import json
import random
from dataclasses import replace

import pytest
from toy_engine import ToyEngine, digest_answer

from graphtrain.data.prepare.chat_templates import find_template
from graphtrain.data.prepare.conversations import Conversation
from graphtrain.data.tokenizers.byte import ByteTokenizer
from graphtrain.errors import DataError, TrainingError
from graphtrain.run.batch_generation import RequestEncoder, continue_all
from graphtrain.run.prompt_file import Prompt, read_prompts
from graphtrain.run.serving.chat_format import chat_format
from graphtrain.run.serving.engine_protocol import SamplingParameters
from graphtrain.run.serving.sequence import SequenceRequest

TOKENIZER = ByteTokenizer()


def request(prompt: bytes, max_tokens: int = 8, seed: int = 0) -> SequenceRequest:
    sampling = SamplingParameters(max_tokens=max_tokens, seed=seed)
    return SequenceRequest(prompt=tuple(prompt), sampling=sampling)


def alone(prompt: bytes, seed: int, max_tokens: int) -> tuple[int, ...]:
    answer, tokens = digest_answer(256), list(prompt)
    for _ in range(max_tokens):
        tokens.append(answer(tokens, seed))
    return tuple(tokens[len(prompt) :])


def test_continuations_are_in_the_order_of_the_prompts_whatever_their_lengths():
    source = random.Random(0)
    requests = [
        request(source.randbytes(source.randint(1, 60)), source.randint(1, 30)) for _ in range(50)
    ]
    engine = ToyEngine(slots=4)
    found = [one for (one,) in continue_all(engine, TOKENIZER, requests, 1)]
    expected = [alone(bytes(one.prompt), 0, one.sampling.max_tokens) for one in requests]
    assert [one.tokens for one in found] == expected
    assert {one.finish_reason for one in found} == {"length"}
    decoding = [active for name, active in engine.calls if name == "decode"]
    assert max(decoding) == 4  # they share the slots


def test_the_samples_of_a_prompt_have_their_own_seeds_and_the_likeliest_is_first():
    requests = [request(b"a prompt of some length", seed=7), request(b"b", seed=7)]
    engine = ToyEngine(slots=2, answer=lambda tokens, seed: (tokens[-1] + seed) % 256)
    first, second = continue_all(engine, TOKENIZER, requests, 3)
    # Log-probabilities fall with the distance from the choice of seed 0; beyond 20, to -infinity.
    assert [one.tokens[0] - ord("h") for one in first] == [7, 8, 9]
    assert [one.tokens[0] - ord("b") for one in second] == [7, 8, 9]
    assert [one.log_prob for one in first] == [-8.0, -9.0, -10.0]


def test_the_prompt_of_several_samples_is_processed_once():
    engine = ToyEngine(slots=2)
    prompt = bytes(range(100))
    list(continue_all(engine, TOKENIZER, [request(prompt), request(b"other")], 4))
    assert sum(tokens for name, tokens in engine.calls if name == "prefill") < 140


def test_a_sequence_that_fails_ends_all():
    engine = ToyEngine()
    engine.failure = TrainingError("logits that are not finite")
    with pytest.raises(TrainingError, match="not finite"):
        list(continue_all(engine, TOKENIZER, [request(b"a")], 1))


def test_lines_are_texts_and_conversations():
    message = {"role": "user", "content": "Hi"}
    lines = [
        b'"a text"\n', b"\n", b'{"prompt": "another", "id": 3}\n',
        json.dumps({"messages": [message]}).encode(),
    ]  # fmt: skip
    assert read_prompts(lines, "f") == [
        Prompt("a text", "f:1"), Prompt("another", "f:3"),
        Prompt(Conversation((message,)), "f:4"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "f:2: not JSON (Expecting property name"),
        (b"3", 'f:2: not a JSON string, or an object with "prompt"'),
        (b'{"text": "a"}', 'f:2: not a JSON string, or an object with "prompt"'),
        (b'{"prompt": "a", "messages": []}', 'f:2: not a JSON string, or an object with "prompt"'),
        (b'{"prompt": 3}', 'f:2: not a JSON string, or an object with "prompt"'),
        (b'{"messages": []}', "f:2: 'messages' is not a list of messages"),
        (b'"\\ud800"', "f:2: the prompt has half a surrogate pair"),
    ],
)
def test_the_number_of_a_wrong_line_is_named(line, message):
    with pytest.raises(DataError) as raised:
        read_prompts([b'"a"', line], "f")
    assert str(raised.value).startswith(message)


def test_a_file_without_prompts_is_refused():
    with pytest.raises(DataError, match=r"^f has no prompts; each line is a JSON string"):
        read_prompts([b"\n"], "f")


def encoder(template: str | None = "chatml") -> RequestEncoder:
    def open_chat():
        if template is None:
            return None
        return chat_format(find_template(template, TOKENIZER), TOKENIZER, ())

    return RequestEncoder(TOKENIZER, (1,), open_chat, context_length=60)


def test_a_conversation_is_answered_up_to_the_mark_of_its_template():
    text = b"Hello.<|im_end|>and more"
    conversation = Conversation(({"role": "user", "content": "Hi"},))
    asked = encoder().request(Prompt(conversation, "f:1"), SamplingParameters(max_tokens=99))
    assert bytes(asked.prompt) == b"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert asked.sampling.max_tokens == 60 - len(asked.prompt)
    engine = ToyEngine(answer=lambda tokens, seed: text[len(tokens) - len(asked.prompt)])
    asked = replace(asked, sampling=replace(asked.sampling, max_tokens=20))
    ((answer,),) = continue_all(engine, TOKENIZER, [asked], 1)
    assert (answer.text, answer.finish_reason) == ("Hello.", "stop")


def test_a_prompt_that_cannot_be_continued_is_named():
    sampling = SamplingParameters()
    assert encoder().request(Prompt("a" * 58, "f:9"), sampling).sampling.max_tokens == 1
    with pytest.raises(DataError, match=r"^f:9: the prompt has 60 tokens, which do not fit"):
        encoder().request(Prompt("a" * 59, "f:9"), sampling)
    conversation = Conversation(({"role": "user", "content": "Hi"},))
    with pytest.raises(DataError, match=r"^f:9: .* no chat template for messages"):
        encoder(None).request(Prompt(conversation, "f:9"), sampling)
