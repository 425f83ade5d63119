"""New projects: a configuration of each kind loads, is short, and nothing is replaced."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from published_folders import write_published

from graphtrain.api.starters import project as project_module
from graphtrain.api.starters.project import create_project
from graphtrain.api.starters.sizes import size_for, steps_for, tokenizer_for
from graphtrain.checkpoints.steps import named_step
from graphtrain.config import load_config
from graphtrain.config.schema import Model
from graphtrain.data.indexed.description import dataset_tokenizer
from graphtrain.errors import ConfigError, DataError, TrainingError
from graphtrain.run.serving.weights import check_step
from graphtrain.weights.families import family_of_model

TEXT = "".join(f"Line {i} of a play.\n\nROMEO: words, words.\n" for i in range(400))


@pytest.fixture
def book(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("book.txt")
    path.write_text(TEXT)
    return path


def hugging_face_folder(path, **settings):
    """Write a Llama of transformers with random weights."""
    model = Model(layers=1, embed=16, heads=2, mlp=24, vocab=300)
    write_published(replace(model, **settings), path)
    return path


@pytest.mark.parametrize("like", ["llama", "gpt2", "shakespeare-char", "hf=model", "lora=model"])
def test_every_kind_of_project_loads_and_is_short(book, like):
    if "=" in like:
        hugging_face_folder(Path("model"))
    made = create_project(Path("p"), like, [book])
    text = made.config_path.read_text()
    assert load_config(Path("p")) == made.config
    assert 20 <= len(text.splitlines()) <= 42
    assert made.config.run.data.validation == "p/data/validation"
    model = made.config.program.model
    assert model.vocab_tokens == {"hf=model": 257, "lora=model": 300}.get(
        like, made.data.train.vocab
    )
    assert tomllib.loads(text)["run"]["data"] == {"directory": "p/data"}


def test_a_new_project_saves_before_its_end_and_says_until_then_how_to_train_it(book):
    run = create_project(Path("p"), "gpt2", [book]).config.run
    assert (
        run.checkpoints.local_every < run.steps
        and run.checkpoints.local_every == run.evaluate_every
    )
    command = re.escape("not trained yet; to train it: graphtrain run p --compile")
    for step in (None, 7):
        with pytest.raises(TrainingError, match=command):
            check_step(run, step)
    with pytest.raises(TrainingError, match=command):
        named_step(Path(run.directory) / "checkpoints", "best")
    with pytest.raises(ConfigError, match=rf"p/run: no such file; .*{command}"):
        load_config(Path("p/run"))


def test_the_text_is_kept_as_it_is(book):
    create_project(Path("p"), "shakespeare-char", [book])
    tokenizer = dataset_tokenizer("p/data/train")
    assert tokenizer is not None and tokenizer.kind == "chars"
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_a_gpt2_can_be_exported(book):
    model = create_project(Path("p"), "gpt2", [book]).config.program.model
    unpadded = replace(model, vocab=model.vocab_tokens, vocab_padding=None)
    assert family_of_model(unpadded).model_type == "gpt2"


def test_nothing_is_replaced(book):
    create_project(Path("p"), "llama", [book])
    before = Path("p/config.toml").read_text()
    with pytest.raises(ConfigError, match=r"p/config.toml exists already; remove it or choose"):
        create_project(Path("p"), "gpt2", [book])
    Path("p/config.toml").unlink()
    with pytest.raises(DataError, match=r"p/data: holds a dataset .* differs in --tokenizer"):
        create_project(Path("p"), "shakespeare-char", [book])
    create_project(Path("p"), "llama", [book])
    assert Path("p/config.toml").read_text() == before


def test_without_files_there_is_a_sample(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(project_module, "_SAMPLE_BYTES", 400_000)
    made = create_project(Path("p"))
    assert made.data.train.tokenizer == "bytes" and Path("p/sample.jsonl").is_file()


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ("gpt3", "--like gpt3: should be one of llama, gpt2, shakespeare-char, lora, hf"),
        ("lora", "--like lora needs the folder of a Hugging Face model: --like lora=FOLDER"),
        ("llama=x", "--like llama takes no folder; only lora and hf do"),
    ],
)
def test_a_kind_that_cannot_be_used_says_why(book, like, message):
    with pytest.raises(ConfigError, match=message):
        create_project(Path("p"), like, [book])
    assert not Path("p").exists()


def test_a_file_that_is_missing_is_named(book):
    with pytest.raises(DataError, match=r"absent.txt: no such file"):
        create_project(Path("p"), data=[Path("absent.txt")])


def test_sizes_grow_with_the_text():
    sizes = [size_for(tokens) for tokens in (10**4, 10**7, 10**8, 10**10)]
    assert [size.embed for size in sizes] == [128, 256, 512, 768]
    assert [steps_for(tokens, 2048) for tokens in (10, 10**6, 10**9)] == [100, 1900, 2000]
    assert [tokenizer_for(size) for size in (10, 10**7)] == ["bytes", "sentencepiece:4096"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"Hello, world!", "the text gives 12 tokens to train on; give at least 129, which is one"),
        (b"\xcb\x00\x01" * 999, "of this text is not UTF-8; .* or give another file if it is a b"),
    ],
)
def test_what_fails_leaves_nothing(book, content, reason):
    Path("it.txt").write_bytes(content)
    with pytest.raises(DataError, match=reason):
        create_project(Path("p"), data=[Path("it.txt")])
    assert not Path("p").exists()
    Path("p").mkdir()
    Path("p/notes").touch()
    with pytest.raises(DataError, match=reason):
        create_project(Path("p"), data=[Path("it.txt")])
    assert [path.name for path in Path("p").iterdir()] == ["notes"]


def test_a_binary_file_is_not_called_json(book):
    Path("it.jsonl").write_bytes(b"\xcb\x00\x01\n")
    with pytest.raises(DataError, match=r"line 1: byte 0 is not UTF-8 text, as of a binary file"):
        create_project(Path("p"), data=[Path("it.jsonl")])


@pytest.mark.parametrize("directory", ["book.txt", "book.txt/p"])
def test_a_file_in_the_way_of_a_project_is_named(book, directory):
    with pytest.raises(ConfigError, match=r"^book.txt is a file; name a directory that does not"):
        create_project(Path(directory), data=[book])
