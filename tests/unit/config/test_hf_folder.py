"""A Hugging Face folder in place of a configuration."""

import json
from dataclasses import replace

import pytest

from graphtrain.config import load_config
from graphtrain.config.hf_folder import served_name
from graphtrain.config.schema import Mesh, check_pipeline
from graphtrain.errors import ConfigError


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "model.safetensors").touch()
    return path


def write(folder, **settings) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 257} | settings
    (folder / "config.json").write_text(json.dumps(config))


def test_the_model_in_a_folder_is_its_configuration(folder):
    write(folder, max_position_embeddings=640, dtype="float32")
    config = load_config(folder)
    assert config.program.model.hf == str(folder) == config.run.init_from
    assert (config.program.model.dtype, config.program.batch.seq_len) == ("float32", 640)
    assert config.run.directory.startswith("runs/model-")
    write(folder, max_position_embeddings=131072, torch_dtype="bfloat16")
    config = load_config(folder, ["program.serve.context_length=4096"])
    assert (config.program.model.dtype, config.program.batch.seq_len) == ("bfloat16", 2048)
    assert config.program.serve.context_length == 4096


def test_a_server_has_the_name_of_the_folder(folder):
    write(folder)
    run = load_config(folder).run
    assert served_name(run.directory, run.init_from) == "model"
    assert served_name("runs/model", run.init_from) == "model"
    assert served_name("runs/tuned", run.init_from) == served_name("runs/tuned", None) == "tuned"


def test_sizes_of_a_model_of_text_and_images_are_those_of_its_text(folder):
    text = {"num_hidden_layers": 2, "vocab_size": 257}
    config = {"model_type": "got_ocr2", "text_config": text, "vision_config": {"depth": 12}}
    (folder / "config.json").write_text(json.dumps(config))
    program = load_config(folder, ["program.batch.microbatches=2"]).program
    assert program.model.vocab == 257
    pipelined = replace(program, mesh=Mesh(stage=2))  # which asks for the number of layers
    assert check_pipeline(pipelined, 2).layers == (1, 1)


def test_a_folder_without_weights_or_with_a_damaged_config_json_is_refused(folder):
    write(folder, num_hidden_layers=-1)
    with pytest.raises(ConfigError, match=r"model/config.json cannot be used"):
        load_config(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="is a directory"):
        load_config(folder)
