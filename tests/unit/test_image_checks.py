"""Images of a program and of its dataset are compared before anything is compiled."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from graphtrain.api.checks.images import image_data_problems, room_problems
from graphtrain.api.checks.purpose import (
    CHECK,
    COMPILE_SERVING,
    GENERATE,
    PLAN,
    SERVE,
    evaluation_purpose,
    run_purpose,
)
from graphtrain.api.checks.report import problems
from graphtrain.config.schema import Batch, Config, Data, Program, Run, TorchModel
from graphtrain.data.indexed.description import read_description
from tests.small_datasets import write_image_dataset

TOKEN, TOKENS, SIZE = 60, 2, (2, 4)
CONFIG = {
    "model_type": "llava",
    "image_token_index": TOKEN,
    "text_config": {"vocab_size": 300, "num_hidden_layers": 2},
    "vision_config": {"patch_size": 2},
}


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model: Any = TorchModel(hf=str(tmp_path), images=2, image_size=SIZE)
    pixels = np.zeros((1, *SIZE, 3), np.uint8)
    documents = [([TOKEN] * TOKENS + [1, 2], pixels), ([TOKEN] * TOKENS + [1] * 20, pixels)]
    write_image_dataset(tmp_path / "train", documents, token=TOKEN, tokens=TOKENS, size=SIZE)
    return Config(
        program=Program(
            target="cpu:1",
            model=model,
            batch=Batch(global_batch_size=1, seq_len=64, cross_document_attention=False),
        ),
        run=Run(directory=str(tmp_path / "run"), steps=1, data=Data(train=str(tmp_path / "train"))),
    )


def with_length(config, length):
    batch = replace(config.program.batch, seq_len=length)
    return replace(config, program=replace(config.program, batch=batch))


def messages(config):
    prefix = config.run.data.train
    found = image_data_problems(config, prefix, ("run", "data", "train"), read_description(prefix))
    return [one.message for one in found]


def test_a_row_has_room_for_the_placeholders_of_its_images(config):
    assert not list(room_problems(with_length(config, 4)))
    (problem,) = room_problems(with_length(config, 3))
    assert problem.kind == "program"
    assert "seq_len = 3 tokens holds at most 1 images of 2 tokens each" in problem.message


def test_saved_runs_whose_rows_have_no_room_for_their_images_are_not_refused(config, tmp_path):
    config = with_length(config, 3)

    def kinds(purpose):
        found = problems(config, purpose)
        return {one.kind for one in found if "holds at most 1 images" in one.message}

    for purpose in (CHECK, PLAN, run_purpose()):
        assert kinds(purpose) == {"program"}
    assert kinds(evaluation_purpose()) == {"data_doubt"}
    for purpose in (GENERATE, SERVE, COMPILE_SERVING):
        assert not kinds(purpose)
    (tmp_path / "run" / "checkpoints" / "1").mkdir(parents=True)
    for purpose in (CHECK, run_purpose(), evaluation_purpose()):
        assert kinds(purpose) == {"data_doubt"}
    assert kinds(run_purpose(fresh=True)) == {"program"}


def test_documents_with_images_that_no_row_takes_are_found_before_compiling(config):
    assert messages(config) == []
    (message,) = messages(with_length(config, 12))
    assert message.startswith("run.data.train: ")
    assert "1 of 2 documents are longer than batch.seq_len = 12" in message
    for setting, value, words in (
        ("packing", "concat", "supports only text"),
        ("overlong", "truncate", "would cut documents with images"),
    ):
        data = replace(config.run.data, **{setting: value})
        (message,) = messages(replace(config, run=replace(config.run, data=data)))
        assert words in message


def test_pixels_that_are_absent_are_named(config, tmp_path):
    (tmp_path / "train_images.idx").unlink()
    (message,) = messages(config)
    assert "train_images.idx" in message
