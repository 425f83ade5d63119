"""The folder of run.init_from beside the data and the processor that a program follows."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from graphtrain.api.checks import weights_folder
from graphtrain.api.checks.weights_folder import (
    normalization_problems,
    processor_problems,
    tokenizer_problems,
)
from graphtrain.config.schema import Batch, Config, Data, Program, Run, TorchModel
from graphtrain.data.indexed.description import read_description
from graphtrain.data.prepare.image_processor import processor_digest
from graphtrain.files import content_digest
from tests.small_datasets import write_image_dataset

CONFIG = {
    "model_type": "llava",
    "image_token_index": 60,
    "text_config": {"vocab_size": 64, "num_hidden_layers": 2},
    "vision_config": {"image_size": 28, "patch_size": 7},
}
PROCESSOR = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.2, 0.2, 0.2], "resample": 3}
IDS = {"a": 0, "b": 1, "<reserved>": 2}
TRAIN = ("run", "data", "train")


def write_folder(folder, processor=PROCESSOR, ids=IDS, unused="1", added=()):
    folder.mkdir(exist_ok=True)
    added = [{"content": text, "id": token} for text, token in dict(added).items()]
    definition = {"version": unused, "model": {"vocab": ids}, "added_tokens": added}
    for name, content in (
        ("config.json", CONFIG),
        ("preprocessor_config.json", processor),
        ("tokenizer.json", definition),
    ):
        (folder / name).write_text(json.dumps(content))
    return str(folder)


@pytest.fixture
def config(tmp_path):
    model: Any = TorchModel(hf=write_folder(tmp_path / "base"), images=1)
    return Config(
        program=Program(
            target="cpu:1",
            model=model,
            batch=Batch(global_batch_size=1, seq_len=64),
        ),
        run=Run(
            directory=str(tmp_path / "run"),
            steps=1,
            init_from=write_folder(tmp_path / "tuned"),
            data=Data(train=str(tmp_path / "train")),
        ),
    )


def test_the_exported_processor_normalizes_as_the_program(config, tmp_path):
    assert not list(normalization_problems(config))
    write_folder(tmp_path / "tuned", PROCESSOR | {"resample": 0})
    assert not list(normalization_problems(config))
    write_folder(tmp_path / "tuned", PROCESSOR | {"image_mean": [0.5, 0.5, 0.25]})
    (problem,) = normalization_problems(config)
    assert problem.kind == "program"
    assert "mean = (0.5, 0.5, 0.25), there (0.5, 0.5, 0.5)" in problem.message
    (doubt,) = normalization_problems(config, saved=True)
    assert doubt == replace(problem, kind="data_doubt")
    text_only = replace(
        config.program, model=replace(config.program.model, images=0, image_size=None)
    )
    assert not list(normalization_problems(replace(config, program=text_only)))


@pytest.mark.parametrize(
    ("ids", "moved"),
    [
        (IDS, None),  # another file, the same tokens
        ({"a": 0, "b": 1, "<tool>": 2, "<added>": 3}, None),
        ({"a": 1, "b": 0, "<reserved>": 2}, "2 tokens have other ids, such as 'a': 1, there 0"),
    ],
)
def test_tokens_of_a_dataset_have_the_ids_of_the_weights(config, tmp_path, ids, moved):
    write_folder(tmp_path, ids=ids, unused="2")
    description = describe(tmp_path, content_digest(tmp_path / "tokenizer.json"))
    found = list(tokenizer_problems(config, str(tmp_path / "train"), TRAIN, description))
    assert [one.kind for one in found] == ["data"] * bool(moved)
    assert all(moved in one.message for one in found)
    doubts = tokenizer_problems(config, str(tmp_path / "train"), TRAIN, description, saved=True)
    assert list(doubts) == [replace(one, kind="data_doubt") for one in found]


@pytest.mark.parametrize(
    ("token", "settings", "kind"),
    [
        (7, {}, "data_doubt"),  # <pad>, or a reserved token of Llama 3, in no document
        (255, {}, "data"),  # in the dataset
        (7, {"eod": 7}, "data"),
        (7, {"bos": (7,)}, "data"),
    ],
)
def test_added_tokens_that_moved_are_an_error_if_the_dataset_has_them(
    config, tmp_path, token, settings, kind
):
    write_folder(tmp_path, added={"<pad>": token, "<other>": 9})
    write_folder(tmp_path / "tuned", added={"<pad>": 8, "<other>": 9})
    description = describe(tmp_path, content_digest(tmp_path / "tokenizer.json"))
    description = replace(description, **settings)
    (found,) = tokenizer_problems(config, str(tmp_path / "train"), TRAIN, description)
    assert found.kind == kind
    assert f"'<pad>': {token}, there 8" in found.message
    assert ("none of which a sample" in found.message) == (kind == "data_doubt")


def test_the_tokenizer_of_the_weights_is_parsed_once_for_a_blend(config, tmp_path, monkeypatch):
    parsed = []
    read = weights_folder.read_object
    monkeypatch.setattr(
        weights_folder, "read_object", lambda path: parsed.append(path) or read(path)
    )
    write_folder(tmp_path, unused="2")
    description = describe(tmp_path, content_digest(tmp_path / "tokenizer.json"))
    for _ in range(2):
        assert not list(tokenizer_problems(config, str(tmp_path / "train"), TRAIN, description))
    assert parsed == [tmp_path / "tokenizer.json", tmp_path / "tuned" / "tokenizer.json"]
    write_folder(tmp_path / "tuned", ids={"a": 0, "b": 5}, unused="3")  # is read again
    assert list(tokenizer_problems(config, str(tmp_path / "train"), TRAIN, description))


def test_pixels_of_another_processor_are_a_doubt(config, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0")
    description, prefix = describe(tmp_path, "0"), str(tmp_path / "train")
    (problem,) = processor_problems(config, prefix, TRAIN, description)
    assert problem.kind == "data_doubt"
    assert "other settings of the image processor" in problem.message
    assert description.images is not None
    own = replace(description.images, processor_digest=processor_digest(tmp_path / "base"))
    same = replace(description, images=own)
    assert not list(processor_problems(config, prefix, TRAIN, same))


def describe(folder, tokenizer_digest):
    """Write a dataset with an image; return its description, with this tokenizer.json."""
    pixels = np.zeros((1, 2, 4, 3), np.uint8)
    prefix = write_image_dataset(folder / "train", [([255] * 4 + [1, 2], pixels)])
    description = read_description(prefix)
    assert description is not None
    return replace(description, tokenizer_file="tokenizer.json", tokenizer_digest=tokenizer_digest)
