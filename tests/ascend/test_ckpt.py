"""Checkpoints of MindSpore: it loads what graphtrain writes, and graphtrain what it writes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from graphtrain.config.render import render_model
from graphtrain.config.schema import Model
from graphtrain.errors import WeightsError
from graphtrain.models.shapes import parameter_arrays
from graphtrain.weights.digests import record_weights
from graphtrain.weights.families.family import array_shape, to_hugging_face
from graphtrain.weights.megatron.layout import RankLayout
from graphtrain.weights.mindspore.convert import from_mindspore
from graphtrain.weights.mindspore.export import to_mindspore
from graphtrain.weights.mindspore.rows import check_llama, mindformers_llama
from graphtrain.weights.open import open_weights
from graphtrain.weights.sources import stored_name
from graphtrain.weights.weight_folder import open_weight_files
from graphtrain.weights.writer import SafetensorsWriter
from lowering.ascend.strategy import strategy_file
from sharding_rules.arrays import ArraySpec
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import ArrayLayout

MODEL = Model(layers=3, embed=16, heads=4, kv_heads=2, mlp=24, vocab=40, bias="qkv")


def quiet(done: int, count: int) -> None:
    """Show nothing."""


def write_random(directory: Path, model: Model) -> Path:
    """A converted folder with random weights."""
    random = np.random.default_rng(0)
    names = {
        stored_name(path, layer): array_shape(path, model)
        for path in parameter_arrays(model)
        for layer in (range(model.layers) if path.startswith("layers/") else [None])
    }
    float32 = np.dtype(np.float32)
    writer = SafetensorsWriter(directory / "weights", {n: (float32, s) for n, s in names.items()})
    for name, shape in names.items():
        writer.write(name, random.standard_normal(shape, np.float32))
    writer.close()
    (directory / "model.toml").write_text(render_model(model))
    record_weights(directory)
    return directory


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted folder of the model."""
    return write_random(tmp_path_factory.mktemp("ours"), MODEL)


def tensors(directory: Path) -> dict[str, np.ndarray]:
    """The complete tensors of MindFormers."""
    weights, found = open_weights(directory), {}
    for group in mindformers_llama().weights(MODEL):
        found |= to_hugging_face(group, weights.read(group.row.paths, group.layer), MODEL)
    return found


@pytest.fixture(scope="module")
def by_rank(ours, tmp_path_factory) -> Path:
    """Two tensor ranks of two stages with 1 and 2 layers."""
    directory = tmp_path_factory.mktemp("by_rank") / "written"
    to_mindspore(ours, directory, quiet, RankLayout(2, 2, layers=(1, 2)))
    return directory


def assert_same(one: Path, other: Path) -> None:
    """Two converted folders have the same model and bits."""
    assert (one / "model.toml").read_bytes() == (other / "model.toml").read_bytes()
    first, second = (open_weight_files(folder / "weights") for folder in (one, other))
    assert set(first.names) == set(second.names)
    for name in first.names:
        assert first.dtype(name) == second.dtype(name)
        assert first.read(name).tobytes() == second.read(name).tobytes(), name


def merged_strategy(mindspore, by_rank: Path, tmp_path: Path) -> str:
    """One file of the strategies of all stages, which MindSpore writes."""
    mindspore.merge_pipeline_strategys(str(by_rank / "strategy"), str(tmp_path / "merged.ckpt"))
    return str(tmp_path / "merged.ckpt")


def loaded(mindspore, path: Path) -> dict[str, np.ndarray]:
    values = mindspore.load_checkpoint(str(path), crc_check=True)
    return {name: value.asnumpy() for name, value in values.items()}


def test_mindspore_joins_the_ranks(mindspore, ours, by_rank, tmp_path):
    rank = loaded(mindspore, by_rank / "rank_3/checkpoint.ckpt")
    assert "model.layers.0.attention.wq.weight" not in rank
    assert rank["model.layers.2.attention.wo.weight"].shape == (16, 8)
    strategy = merged_strategy(mindspore, by_rank, tmp_path)
    mindspore.transform_checkpoints(str(by_rank), str(tmp_path / "whole"), "whole", strategy, None)
    whole = loaded(mindspore, tmp_path / "whole/rank_0/whole0.ckpt")
    expected = tensors(ours)
    assert set(whole) == set(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(whole[name], tensor, err_msg=name)


@pytest.mark.parametrize("merged", [False, True])
def test_ranks_come_back_bit_for_bit(merged, mindspore, ours, by_rank, tmp_path):
    strategy = Path(merged_strategy(mindspore, by_rank, tmp_path)) if merged else None
    from_mindspore(by_rank, tmp_path / "back", quiet, strategy=strategy)
    assert_same(tmp_path / "back", ours)


def test_what_mindspore_divides_otherwise_is_read(mindspore, ours, by_rank, tmp_path):
    layouts = {
        name: ArrayLayout(
            ArraySpec(tensor.shape, (None,) * tensor.ndim),
            ((), ("tensor", "data")) if tensor.ndim == 2 else (("data",),),
        )
        for name, tensor in tensors(ours).items()
    }
    other = tmp_path / "other.ckpt"
    other.write_bytes(strategy_file(layouts, MeshShape({"data": 2, "fsdp": 2, "tensor": 2})))
    strategy = merged_strategy(mindspore, by_rank, tmp_path)
    there = tmp_path / "there"
    mindspore.transform_checkpoints(str(by_rank), str(there), "other", strategy, str(other))
    assert len(list(there.glob("rank_*/*.ckpt"))) == 8
    model = str(by_rank / "model.toml")
    from_mindspore(there, tmp_path / "back", quiet, model, other)
    assert_same(tmp_path / "back", ours)


@pytest.mark.parametrize("crc", [False, True])
def test_what_mindspore_saves_is_read(crc, mindspore, ours, tmp_path):
    state = {"adam_m.model.layers.0.attention.wq.weight": np.ones((16, 16), np.float32)}
    saved = [
        {"name": name, "data": mindspore.Tensor(tensor)}
        for name, tensor in (tensors(ours) | state).items()
    ]
    saved.append({"name": "global_step", "data": mindspore.Tensor(7, mindspore.int32)})
    path = tmp_path / "llama.ckpt"
    mindspore.save_checkpoint(saved, str(path), crc_check=crc, append_dict={"epoch_num": 3})
    from_mindspore(path, tmp_path / "back", quiet, str(ours / "model.toml"))
    assert_same(tmp_path / "back", ours)


def test_bfloat16_goes_both_ways(mindspore, ours, tmp_path):
    to_mindspore(ours, tmp_path / "half", quiet, RankLayout(), "bfloat16")
    values = mindspore.load_checkpoint(str(tmp_path / "half/rank_0/checkpoint.ckpt"))
    assert {value.dtype for value in values.values()} == {mindspore.bfloat16}
    again = tmp_path / "again.ckpt"
    mindspore.save_checkpoint([{"name": n, "data": v} for n, v in values.items()], str(again))
    model = str(ours / "model.toml")
    from_mindspore(tmp_path / "half", tmp_path / "first", quiet)
    from_mindspore(again, tmp_path / "second", quiet, model)
    assert_same(tmp_path / "first", tmp_path / "second")


def test_a_tied_head_needs_one_stage(tmp_path):
    (tmp_path / "tied").mkdir()
    model = replace(MODEL, tie_word_embeddings=True, bias="attention")
    tied = write_random(tmp_path / "tied", model)
    with pytest.raises(WeightsError, match="tie_word_embeddings = true needs --pipeline 1"):
        to_mindspore(tied, tmp_path / "stages", quiet, RankLayout(1, 2, layers=(1, 2)))
    assert not (tmp_path / "stages").exists()
    to_mindspore(tied, tmp_path / "written", quiet, RankLayout(2))
    from_mindspore(tmp_path / "written", tmp_path / "back", quiet)
    assert_same(tmp_path / "back", tied)


@pytest.mark.parametrize(
    "changed",
    [
        {"activation": "geglu"},
        {"activation": "geglu", "bias": "none"},
        {"sliding_window": 8},
        {"head_dim": 8, "bias": "none"},
    ],
)
def test_what_mindformers_llama_does_not_compute_is_refused(changed):
    check_llama(replace(MODEL, bias="none"))
    check_llama(MODEL)
    with pytest.raises(WeightsError, match="MindFormers' Llama has RMSNorm, SwiGLU"):
        check_llama(replace(MODEL, **changed))
