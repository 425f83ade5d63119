"""What a configuration takes from its datasets: paths in a directory, and the vocabulary."""

import pytest

from graphtrain.config import load_config, render
from graphtrain.config.identity import mathematics
from graphtrain.data.prepare.text import prepare
from graphtrain.errors import ConfigError

CONFIG = """
[program]
target = "cpu:1"

[program.model]
layers = 2
embed = 32
heads = 4
mlp = 64

[program.batch]
global_batch_size = 8
seq_len = 32

[run]
directory = "run"
steps = 10
data = { directory = "DATA" }
"""


@pytest.fixture
def data(make_corpus, tmp_path):
    corpus = make_corpus([f"document {i} of a corpus" for i in range(99)])
    prepare([corpus], tmp_path / "data", "bytes", validation=0.2)
    return tmp_path / "data"


@pytest.fixture
def load(tmp_path):
    def load(data, *overrides):
        (tmp_path / "config.toml").write_text(CONFIG.replace("DATA", str(data)))
        return load_config(tmp_path / "config.toml", overrides)

    return load


def test_a_directory_stands_for_its_datasets_and_their_vocabulary(data, load, tmp_path):
    loaded = load(data)
    assert (loaded.run.data.train, loaded.run.data.validation) == (
        f"{data}/train",
        f"{data}/validation",
    )
    model = loaded.program.model
    assert (model.vocab, model.vocab_padding, model.vocab_tokens) == (320, 63, 257)
    assert mathematics(loaded)["program.model.vocab_padding"] == 63
    (tmp_path / "config.toml").write_text(render(loaded))
    assert load_config(tmp_path / "config.toml") == loaded


def test_explicit_datasets_and_an_absent_validation_set_count(data, load):
    other = load(data, f"run.data.validation={data}/train").run.data
    assert (other.train, other.validation) == (f"{data}/train", f"{data}/train")
    loaded = load_config(load("nowhere", "program.model.vocab=9"), [f"run.data.directory={data}"])
    assert loaded.run.data.train == f"{data}/train"
    for suffix in ("bin", "idx", "json"):
        (data / f"validation.{suffix}").unlink()
    assert load(data).run.data.validation is None


@pytest.mark.parametrize(
    ("mesh", "rows"),
    [("target=cpu:8,mesh={tensor=8}", 320), ("target=cpu:6,mesh={tensor=3,data=2}", 384)],
)
def test_the_vocabulary_is_padded_to_what_the_mesh_divides(data, load, mesh, rows):
    target, mesh = mesh.split(",", 1)
    model = load(data, f"program.{target}", f"program.{mesh}").program.model
    assert (model.vocab, model.vocab_tokens) == (rows, 257)


def test_a_vocabulary_that_is_set_stays_and_needs_no_data(load):
    model = load("nowhere", "program.model.vocab=257").program.model
    assert (model.vocab, model.vocab_padding) == (257, None)
    with pytest.raises(ConfigError, match=r"vocab_padding = 257 is not below vocab = 257"):
        load("nowhere", "program.model.vocab=257", "program.model.vocab_padding=257")


def test_data_that_states_no_vocabulary_says_what_to_do(data, load, tmp_path):
    with pytest.raises(
        ConfigError, match=r"config.toml: nowhere/train.json: no such file; .*set program.model.voc"
    ):
        load("nowhere")
    images = tmp_path / "images"
    images.mkdir()
    (images / "street_images.idx").touch()
    (images / "street_images_images.idx").touch()
    with pytest.raises(ConfigError, match=r"is a directory, not a dataset; it holds train, vali"):
        load(data, f"run.data.train={data}")
    with pytest.raises(ConfigError, match=r"it holds street_images: name one"):
        load(images, f"run.data.train={images}")
    (data / "train.json").unlink()
    with pytest.raises(ConfigError, match=r"train.json: no such file, so the vocabulary"):
        load(data)
    with pytest.raises(ConfigError, match=r"run.data.directory = 3: should be a string"):
        load(data, "run.data.directory=3")


def test_the_largest_vocabulary_of_a_blend_counts(data, load, make_corpus, tmp_path):
    prepare([make_corpus(["abc", "cab"])], tmp_path / "small", "chars", validation=0)
    parts = [f"{{dataset='{tmp_path}/{name}/train', weight=1.0}}" for name in ("small", "data")]
    loaded = load(data, f"run.data.train=[{', '.join(parts)}]")
    assert loaded.program.model.vocab_tokens == 257
