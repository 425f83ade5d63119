"""The server and the client of OpenAI: what is asked for is answered, and to whom."""

import asyncio
import random
import re
import socket
import time
from contextlib import ExitStack

import httpx2 as httpx
import pytest
from toy_engine import ToyEngine, digest_answer, written_answer
from toy_server import TOKENIZER, served

openai = pytest.importorskip("openai", reason="openai is not installed")

STORY = "Once there was a compiler; it wrote 中文 and émojis 😀.\n\nThe end. "


@pytest.fixture(scope="module")
def story():
    """Address of a server that tells one story after a colon."""
    engine = ToyEngine(slots=8, context_length=512, answer=written_answer(STORY.encode()))
    with served(engine) as url:
        yield url


@pytest.fixture(scope="module")
def connect():
    """Make clients that are closed in the end."""
    with ExitStack() as clients:

        def make(url, **settings):
            settings = {"base_url": f"{url}/v1", "api_key": "unused"} | settings
            return clients.enter_context(openai.OpenAI(**settings))

        yield make


@pytest.fixture(scope="module")
def client(story, connect):
    return connect(story, max_retries=0)


def told(characters: int) -> str:
    return (STORY * 3)[:characters]


def alone(prompt: bytes, seed: int, max_tokens: int) -> str:
    """Text that the engine with digests gives, by its definition."""
    answer, tokens = digest_answer(256), list(prompt)
    for _ in range(max_tokens):
        tokens.append(answer(tokens, seed))
    return TOKENIZER.decode(tokens[len(prompt) :])


def test_a_completion_has_what_the_client_expects(client):
    answer = client.completions.create(model="toy", prompt="Tell:", max_tokens=9)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (told(9), "length", 0)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 9, 14)


def test_a_stream_has_the_same_text_and_never_half_a_character(client):
    size = len(STORY.encode())
    options = {"include_usage": True}
    chunks = list(
        client.completions.create(
            model="toy", prompt="Tell:", max_tokens=size, stream=True, stream_options=options
        )
    )
    texts = [choice.text for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == STORY and len(texts) > 10 and "\ufffd" not in "".join(texts)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == size
    assert chunks[-2].choices[0].finish_reason == "length"


def test_prompts_may_be_lists_of_texts_and_of_tokens(client):
    for prompt in (["a:", "b:"], [[97, 58], [98, 58]]):
        answer = client.completions.create(model="toy", prompt=prompt, max_tokens=4, n=2)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert {choice.text for choice in answer.choices} == {"Once"}
        assert answer.usage.prompt_tokens == 4
    answer = client.completions.create(model="toy", prompt=[97, 58], max_tokens=4)
    assert answer.choices[0].text == "Once"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_wherever_tokens_cut_them(client, stream):
    answer = client.completions.create(
        model="toy", prompt="a:", max_tokens=200, stop=["\n\n", "zzz"], stream=stream
    )
    choices = [c for chunk in (answer if stream else [answer]) for c in chunk.choices]
    assert "".join(choice.text for choice in choices) == STORY.partition("\n\n")[0]
    assert choices[-1].finish_reason == "stop"


def test_log_probabilities_belong_to_their_tokens(client):
    answer = client.completions.create(
        model="toy", prompt="a:", max_tokens=4, logprobs=3, echo=True
    )
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert choice.text == "a:Once" and logprobs.tokens == list("a:Once")
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert logprobs.token_logprobs[2:] == [-1.0] * 4
    assert logprobs.text_offset == list(range(6))
    assert logprobs.top_logprobs[2] == {"O": -1.0, "P": -2.0, "Q": -3.0}


@pytest.mark.parametrize("stream", [False, True])
def test_the_token_that_ends_a_text_has_a_log_probability(client, stream):
    """lm-eval asks for one token after a text, and takes the last entry to be that one."""
    answer = client.completions.create(
        **{"model": "toy", "prompt": "a:", "max_tokens": 1, "logprobs": 1, "echo": True},
        extra_body={"stop_token_ids": list(b"O")},
        stream=stream,
    )
    choices = [c for chunk in (answer if stream else [answer]) for c in chunk.choices]
    scores = [score for c in choices if c.logprobs for score in c.logprobs.token_logprobs]
    assert len(scores) == 3 and scores[-1] == -1.0
    assert "".join(choice.text for choice in choices) == "a:"
    assert choices[-1].finish_reason == "stop"


def test_a_prompt_is_scored_without_generating(client):
    answer = client.completions.create(
        model="toy", prompt=list(b"ab"), max_tokens=0, logprobs=1, echo=True, temperature=0
    )
    (choice,) = answer.choices
    assert choice.text == "ab" and choice.logprobs.tokens == ["a", "b"]
    assert choice.logprobs.token_logprobs == [None, -9999.0]
    assert answer.usage.completion_tokens == 0


def test_best_of_returns_the_most_likely_samples(client):
    answer = client.completions.create(model="toy", prompt="a:", max_tokens=3, n=2, best_of=5)
    assert [choice.text for choice in answer.choices] == ["Onc", "Onc"]
    assert answer.usage.completion_tokens == 15


def test_a_chat_is_rendered_by_the_template_and_ends_with_its_mark(connect):
    text = b"Hello.<|im_end|>and more"
    seen = []

    def answer(tokens, seed):
        begin = bytes(tokens).rindex(b"assistant\n") + len(b"assistant\n")
        if begin == len(tokens):
            seen.append(bytes(tokens).decode())
        return text[(len(tokens) - begin) % len(text)]

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    with served(ToyEngine(answer=answer)) as url:
        client = connect(url)
        create = client.chat.completions.create
        whole = create(model="toy", messages=messages, logprobs=True, top_logprobs=2)
        streamed = list(create(model="toy", messages=messages, stream=True))
    (choice,) = whole.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello.")
    assert choice.finish_reason == "stop"
    assert [entry.token for entry in choice.logprobs.content] == list("Hello.")
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    deltas = [chunk.choices[0].delta for chunk in streamed]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Hello."
    assert streamed[-1].choices[0].finish_reason == "stop"
    assert seen[0] == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_model_without_a_template_refuses_chats_and_says_what_to_do(connect):
    with served(ToyEngine(), template=None) as url:
        client = connect(url)
        with pytest.raises(openai.BadRequestError, match=r"no chat template.*--chat-template"):
            client.chat.completions.create(
                model="toy", messages=[{"role": "user", "content": "Hi"}]
            )


def test_many_requests_at_once_get_each_its_own_answer():
    source = random.Random(1)
    asked = [
        (source.randbytes(source.randint(1, 60)), source.randrange(100), source.randint(1, 24))
        for _ in range(200)
    ]

    async def ask(client, index):
        prompt, seed, max_tokens = asked[index]
        answer = await client.completions.create(
            model="toy", prompt=list(prompt), seed=seed, max_tokens=max_tokens,
            stream=index % 2 == 0,
        )  # fmt: skip
        if index % 2:
            return answer.choices[0].text
        return "".join([chunk.choices[0].text async for chunk in answer])

    async def ask_all(url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as client:
            return await asyncio.gather(*(ask(client, index) for index in range(len(asked))))

    with served(ToyEngine(slots=8)) as url:
        texts = asyncio.run(ask_all(url))
        metrics = httpx.get(f"{url}/metrics").text
    assert texts == [alone(*one) for one in asked]
    assert 'graphtrain_requests_total{path="/v1/completions",status="200"} 200.0' in metrics
    assert "graphtrain_sequences_finished_total 200.0" in metrics
    assert "graphtrain_time_to_first_token_seconds_count 200.0" in metrics


def test_a_client_that_leaves_frees_its_slot(connect):
    engine = ToyEngine(slots=1, context_length=100_000, seconds_per_call=0.005)
    with served(engine) as url:
        client = connect(url, max_retries=0)
        with client.completions.create(
            model="toy", prompt="a", max_tokens=90_000, stream=True
        ) as stream:
            next(iter(stream))
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(model="toy", prompt="a", max_tokens=90_000, timeout=0.3)
        answer = client.completions.create(model="toy", prompt="b", max_tokens=3, timeout=5)
        assert answer.usage.completion_tokens == 3
        metrics = httpx.get(f"{url}/metrics").text
    assert "graphtrain_sequences_cancelled_total 2.0" in metrics


def test_a_client_that_leaves_while_it_asks_is_no_defect(caplog):
    with served(ToyEngine()) as url:
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
            client.sendall(head + b"application/json\r\nContent-Length: 100\r\n\r\n{")
        for _ in range(100):
            metrics = httpx.get(f"{url}/metrics").text
            if "graphtrain_requests_total" in metrics:
                break
            time.sleep(0.02)
    assert 'graphtrain_requests_total{path="/v1/completions",status="499"} 1.0' in metrics
    assert not caplog.records


def test_a_full_queue_is_refused_and_the_client_tries_again():
    engine = ToyEngine(slots=1, seconds_per_call=0.01)
    with served(engine, max_queue=2) as url:

        async def ask(client):
            try:
                await client.completions.create(model="toy", prompt="a", max_tokens=60)
            except openai.RateLimitError as error:
                assert "busy" in str(error)
                return False
            return True

        async def ask_all(retries):
            async with openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="unused", max_retries=retries
            ) as client:
                return await asyncio.gather(*(ask(client) for _ in range(4)))

        assert asyncio.run(ask_all(0)).count(True) == 3
        assert all(asyncio.run(ask_all(5)))


def test_more_prompts_than_the_queue_ever_takes_are_refused_for_good(connect):
    with served(ToyEngine(slots=1), max_queue=2) as url:
        client = connect(url)
        with pytest.raises(openai.BadRequestError, match=r"4 sequences.*at most 3 at a time"):
            client.completions.create(model="toy", prompt=["a"] * 4, max_tokens=1)
        assert len(client.completions.create(model="toy", prompt=["a"] * 3).choices) == 3


def test_the_api_key_opens_the_api_and_nothing_else_needs_it(connect):
    with served(ToyEngine(), api_key="sesame") as url:
        for key in ("wrong", "sesam", "sesame2"):
            with pytest.raises(openai.AuthenticationError):
                connect(url, api_key=key).models.list()
        (model,) = connect(url, api_key="sesame").models.list().data
        assert model.id == "toy"
        assert httpx.get(f"{url}/health").status_code == 200


def test_embeddings_are_refused_and_unknown_models_too(client):
    with pytest.raises(openai.NotFoundError, match="no embeddings: its model is a causal"):
        client.embeddings.create(model="toy", input="a")
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'; this server has 'toy'"):
        client.completions.create(model="gpt", prompt="a:")
    assert client.models.retrieve("toy").id == "toy"


def test_two_limits_of_an_answer_that_differ_are_refused(client):
    question = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]}
    with pytest.raises(openai.BadRequestError, match="max_tokens = 3 and max_completion_tokens"):
        client.chat.completions.create(**question, max_tokens=3, max_completion_tokens=4)
    answer = client.chat.completions.create(**question, max_tokens=3, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3


def test_adapters_are_models_that_requests_choose(connect):
    engine = ToyEngine(adapters=["first", "second"], answer=written_answer(b"abc"))
    with served(engine) as url:
        client = connect(url)
        listed = client.models.list().data
        assert [(model.id, model.parent) for model in listed] == [
            ("toy", None), ("first", "toy"), ("second", "toy"),
        ]  # fmt: skip
        assert client.models.retrieve("second").id == "second"
        with pytest.raises(openai.NotFoundError, match="'toy', 'first', 'second'"):
            client.completions.create(model="third", prompt="a:")

        async def ask_all():
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as client:
                create = client.completions.create
                names = ["toy", "first", "second"] * 20
                return await asyncio.gather(
                    *(create(model=name, prompt="Tell:", max_tokens=4) for name in names)
                )

        texts = {"toy": "abca", "first": "bcdb", "second": "cdec"}
        answers = asyncio.run(ask_all())
        assert len(answers) == 60
        assert all(answer.choices[0].text == texts[answer.model] for answer in answers)
        scored = client.completions.create(
            model="first", prompt=":b", max_tokens=0, echo=True, logprobs=1
        )
        assert scored.choices[0].logprobs.token_logprobs[1] == -1.0
        message = {"role": "user", "content": "a"}
        chat = client.chat.completions.create(model="second", messages=[message], max_tokens=3)
        assert chat.model == "second"


def test_an_engine_that_fails_ends_its_requests_and_is_seen(connect):
    engine = ToyEngine(slots=1, seconds_per_call=0.01)
    with served(engine) as url:
        client = connect(url, max_retries=0)
        engine.failure = ZeroDivisionError("a defect")
        with pytest.raises(openai.InternalServerError, match="the model failed"):
            client.completions.create(model="toy", prompt="a")
        assert httpx.get(f"{url}/health").json() == {"status": "failed"}


def test_the_context_is_a_limit_that_the_error_names(client):
    with pytest.raises(openai.BadRequestError, match=re.escape("context is 512 tokens, but 600")):
        client.completions.create(model="toy", prompt="a" * 500, max_tokens=100)
