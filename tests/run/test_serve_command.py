"""The commands serve and chat with a real engine, on a model that compiles in seconds."""

import asyncio
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from places import Place
from unoptimized import XLA_FLAGS

from graphtrain.cache import Cache
from graphtrain.cache.key import CacheKey
from lowering.artifact import Artifact

openai = pytest.importorskip("openai", reason="openai is not installed")

COUNTED = Path(__file__).with_name("counted_compilations.py")

# Few graphs, and a context of bytes with room for a template.
SMALL = [
    "--set", "program.serve.context_length=96", "--set", "program.serve.prefill=[32]",
]  # fmt: skip


@contextmanager
def serving(place: Place, *words: str, config: str = "config.toml") -> Iterator[str]:
    """Serve a run; yield the address when the model is ready; SIGTERM ends it with 0.

    From the start of the process to its end, nothing is traced or compiled.
    """
    events = place.path / "events.json"
    command = [str(COUNTED), str(events), "serve", config, "--port", "0", *words]
    with place.start_python(*command) as process:
        assert process.stderr is not None
        try:
            url = process.stderr.readline().removeprefix("listening on ").strip()
            assert process.stderr.readline().startswith("ready after ")
            yield url
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0, process.stderr.read()
            assert json.loads(events.read_text()) == []
        finally:
            process.kill()


async def ask_all(url: str, requests: list[dict], count: int) -> list[tuple[int, str]]:
    """Ask at the same time, `count` times one of the requests; return its index and the text."""
    chosen = random.Random(1).choices(range(len(requests)), k=count)

    async def ask(index: int) -> tuple[int, str]:
        answer = await client.completions.create(model="run", **requests[index])
        return index, answer.choices[0].text

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        return await asyncio.gather(*map(ask, chosen))


def kill_a_server(place: Place, *words: str) -> None:
    """Start a server, and end it with SIGKILL while it answers."""
    with place.start("serve", "config.toml", "--port", "0", *words) as process:
        assert process.stderr is not None
        url = process.stderr.readline().removeprefix("listening on ").strip()
        assert process.stderr.readline().startswith("ready after ")
        # Else its socket is closed by a later collection, with a warning that fails the test.
        with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            stream = client.completions.create(model="run", prompt="a", max_tokens=80, stream=True)
            next(iter(stream))
            process.kill()


def refuse_damaged_programs(place: Place) -> None:
    """A server with a program that is damaged, or cannot be loaded, ends and names it."""
    copied = replace(place, cache=place.path / "copied")
    shutil.copytree(place.cache, copied.cache)
    store, words = Cache(copied.cache), ("serve", "config.toml", "--port", "0", *SMALL)
    requests = [*map(json.loads, map(Path.read_bytes, (store.root / "v1/requests").iterdir()))]
    programs = {one["program"] for one in requests if one["graph"] == "decode"}
    for digest in programs:
        described = store.describe(digest)
        shutil.rmtree(store.root / "v1/programs" / digest)
        key = CacheKey.from_json(described["key"])
        store.put(key, Artifact(b"no program", described["record"]))
    _, err = copied.command(*words, status=2)
    assert "error: the compiled decode step cannot be loaded" in err
    for digest in programs:
        (store.root / "v1/programs" / digest / "payload").write_bytes(b"no_program")
    _, err = copied.command(*words, status=3)
    assert "is damaged" in err and "no compiled decode step" in err and "listening" not in err


def kept_files(place: Place) -> list[Path]:
    """Wait until a server has kept its weights; return their files, in one folder."""
    while not (folders := [*(place.path / "run/serving").glob("[!.]*")]):
        time.sleep(0.05)
    (folder,) = folders
    return sorted(folder.rglob("*.npy"))


def serve_kept_weights(place: Place, request: dict, text: str) -> None:
    """Weights that a server kept give the same text, and damaged ones are noticed and removed."""
    with (
        serving(place, *SMALL) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client,
    ):
        assert client.completions.create(model="run", **request).choices[0].text == text
    damaged = kept_files(place)[0]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    words = "generate", "config.toml", "a", *SMALL, "--tokens", "2"
    _, err = place.command(*words)
    assert f"{damaged.name} does not have the digest it was written with; it is made again" in err
    assert not damaged.exists()
    _, err = place.command(*words)
    assert "made again" not in err


def test_a_run_is_compiled_served_and_chatted_with(place, monkeypatch):
    place.command("run", "config.toml", "--set", "run.steps=2")
    monkeypatch.setenv("XLA_FLAGS", XLA_FLAGS)  # compiled quickly
    # Of these slots no other test has programs in the store.
    unlike = [*SMALL, "--set", "program.serve.slots=3"]
    _, missing = place.command("serve", "config.toml", "--port", "0", *unlike, status=3)
    assert "run: graphtrain compile config.toml --set program.serve.context_length=96" in missing
    assert missing.endswith(f"--cache {place.cache} --for serve\n")
    place.command("compile", "config.toml", "--for", "serve", *SMALL)
    source = random.Random(0)
    prompts = [[*source.randbytes(source.randint(1, 20))] for _ in range(12)]
    options = {"model": "run", "max_tokens": 8, "temperature": 0, "logprobs": 1}
    kill_a_server(place, *SMALL)
    requests = [
        {
            "prompt": [*source.randbytes(source.randint(1, 60))],
            "max_tokens": source.randint(1, 30),
            "seed": source.randrange(100),
            "temperature": source.choice([0, 0.8, 1.5]),
            "top_p": source.choice([0.9, 1]),
        }
        for _ in range(50)
    ]
    with (
        serving(place, *SMALL, "--chat-template", "chatml") as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client,
    ):
        create = client.completions.create
        together = create(prompt=prompts, **options)
        alone = [create(prompt=one, **options) for one in prompts]
        sampled = [create(model="run", prompt="a", max_tokens=20, seed=7) for _ in range(2)]
        question = {"role": "user", "content": "a"}
        chat = client.chat.completions.create(
            model="run", messages=[question], max_tokens=3, stream=True
        )
        assert len(list(chat)) >= 3
        texts = [create(model="run", **request).choices[0].text for request in requests]
        answers = asyncio.run(ask_all(url, requests, 500))
        assert len(answers) == 500 and {index for index, _ in answers} == set(range(50))
        assert all(text == texts[index] for index, text in answers)
        assert kept_files(place)
    serve_kept_weights(place, requests[0], texts[0])
    for one, choice in zip(alone, together.choices, strict=True):
        assert one.choices[0].logprobs.tokens == choice.logprobs.tokens
        expected = pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
        assert one.choices[0].logprobs.token_logprobs == expected
    assert sampled[0].choices[0].text == sampled[1].choices[0].text
    refuse_damaged_programs(place)
    words = "chat", "config.toml", *SMALL, "--chat-template", "chatml", "--tokens", "3"
    talk = subprocess.run(
        [sys.executable, "-m", "graphtrain", *words],
        input="a\n/quit\n",
        cwd=place.path,
        env=place.environment(),
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert talk.returncode == 0, talk.stderr


LORA = """
[program.adapter]
rank = 4
alpha = 32.0
"""
ROOM = ["--set", "program.serve.total_adapter_rank=8"]


async def complete_all(url: str, names: list[str], prompts: list[str]) -> dict[str, list]:
    """Continue prompts by several models at the same time; return the choices by model."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        create = client.completions.create
        answers = await asyncio.gather(
            *(
                create(model=name, prompt=prompt, max_tokens=8, temperature=0, logprobs=1)
                for prompt in prompts
                for name in names
            )
        )
    return {
        name: [answer.choices[0].logprobs for answer in answers if answer.model == name]
        for name in names
    }


def test_adapters_of_runs_and_of_peft_are_served_by_name(place, monkeypatch):
    place.command("run", "config.toml", "--set", "run.steps=3")
    monkeypatch.setenv("XLA_FLAGS", XLA_FLAGS)  # compiled quickly
    text = (place.path / "config.toml").read_text().replace('"run"', '"lora"')
    text = text.replace("steps = 16", 'steps = 4\ninit_from = "run"')
    (place.path / "lora.toml").write_text(text + LORA)
    place.command("run", "lora.toml", "--compile")
    place.command("convert", "graphtrain-to-hf", "lora", "peft", "--adapter")
    place.command("compile", "config.toml", "--for", "serve", *SMALL, *ROOM)
    place.command("compile", "lora.toml", "--for", "serve", *SMALL)
    adapters = ["--adapter", "first=lora", "--adapter", "second=peft"]
    prompts = ["It was", "the common beginning of a prompt: a", "the common beginning of a prompt"]
    with serving(place, *SMALL, *ROOM, *adapters) as url:
        answers = asyncio.run(complete_all(url, ["run", "first", "second"], prompts))
        with openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
            assert [one.id for one in client.models.list().data] == ["run", "first", "second"]
            with pytest.raises(openai.NotFoundError, match="no model 'third'"):
                client.completions.create(model="third", prompt="a")
    with serving(place, *SMALL, config="lora.toml") as url:
        merged = asyncio.run(complete_all(url, ["lora"], prompts))["lora"]
    for name in ("first", "second"):
        for got, want in zip(answers[name], merged, strict=True):
            assert got.tokens == want.tokens
            assert got.token_logprobs == pytest.approx(want.token_logprobs, abs=1e-5)
    for got, want in zip(answers["run"], merged, strict=True):
        assert got.token_logprobs != pytest.approx(want.token_logprobs, abs=1e-3)
    place.command("run", "config.toml", "--set", "run.steps=4", "--compile")
    refused = ["serve", "config.toml", "--port", "0", *SMALL, *ROOM, *adapters]
    _, error = place.command(*refused, status=2)
    assert "adapter 'first': lora was trained on other weights than those that" in error
    assert "listening" not in error
