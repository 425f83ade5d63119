"""Supervised fine-tuning with the real commands: conversations, training, export."""

import json

import numpy as np
import pytest
import transformers

from graphtrain.data.batches.loader import Loader
from graphtrain.data.tokenizers.huggingface import train_bpe

# Short, so that a conversation fits into the 32 tokens of the programs that are compiled already.
TEMPLATE = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- generation %}{{- m.content + '<|endoftext|>' }}{%- endgeneration %}"
    "{%- else %}{{- m.content + '? ' }}{%- endif %}{%- endfor %}"
)
SETTINGS = [
    "--set", "run.data.train=chats/train", "--set", "run.data.validation=chats/validation",
]  # fmt: skip


@pytest.fixture
def chats(place):
    """Questions that have one answer each, and a tokenizer that fits the compiled model."""
    train_bpe(["What is two or three"], 257).save(place.path / "tokenizer")
    (place.path / "short.jinja").write_text(TEMPLATE)
    words = ["one", "two", "three", "four"]
    records = [
        {"instruction": f"What is {number % 4} {number}", "output": words[number % 4]}
        for number in range(200)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (place.path / "chats.jsonl").write_text(lines)
    options = ["--output", "chats", "--tokenizer", "tokenizer", "--chat-template", "short.jinja"]
    _, err = place.command("data", "instruct", "chats.jsonl", *options)
    assert "conversations" in err and "trained on" in err
    return place


def test_answers_are_learned_resumed_and_exported_with_the_template(chats):
    words = [*SETTINGS, "--set", "run.learning_rate.schedule=constant"]
    chats.command("run", "config.toml", *words)
    curve = chats.curve()
    assert curve[-1][1] < 0.5 * curve[0][1]
    loader = Loader(chats.path / "chats/train", global_batch_size=8, seq_len=32, seed=0)
    counted = [int(next(loader)["weights"].sum()) for _ in range(16)]
    loader.close()
    assert [one["targets"] for one in chats.journal() if "loss" in one] == counted
    assert np.mean(counted) < 8 * 8  # of 8 * 32 tokens

    for steps in ("7", "16"):
        again = ["--set", "run.directory=again", "--set", f"run.steps={steps}"]
        chats.command("run", "config.toml", *words, *again)
    assert chats.curve("again") == curve

    chats.command("convert", "graphtrain-to-hf", "run", "exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained(chats.path / "exported")
    assert tokenizer.chat_template == TEMPLATE
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "Hi? Ho<|endoftext|>"


def test_conversations_that_do_not_fit_are_refused_before_a_step(chats):
    long = {"instruction": "What is it", "output": "a long answer " * 9}
    (chats.path / "chats.jsonl").write_text((json.dumps(long) + "\n") * 50)
    options = ["--output", "chats", "--tokenizer", "tokenizer", "--chat-template", "short.jinja"]
    chats.command("data", "instruct", "chats.jsonl", *options, "--replace")
    _, err = chats.command("run", "config.toml", *SETTINGS, status=2)
    assert "documents are longer than batch.seq_len = 32" in err and "run.data.overlong" in err
    assert not chats.curve()


def test_a_validation_set_that_cannot_be_used_is_refused_before_a_step(place):
    words = ["--set", "run.data.validation=data/absent", "--set", "run.directory=absent"]
    _, err = place.command("run", "config.toml", *words, status=2)
    assert "data/absent.bin: no such file" in err
    assert not place.curve("absent")
