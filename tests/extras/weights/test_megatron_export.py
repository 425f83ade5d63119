"""megatron-core loads what graphtrain writes, on other ranks, with the same scores."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from graphtrain.weights.megatron.convert import from_megatron
from graphtrain.weights.megatron.export import Format, MegatronForm, to_megatron
from graphtrain.weights.megatron.layout import RankLayout
from graphtrain.weights.weight_folder import open_weight_files


@dataclass(frozen=True)
class Case:
    model: str
    form: Format
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    layers: tuple[int, ...] = ()


# Ranks that load: for torch-dist others than those for which the arguments are written.
CASES = {
    "qwen-dist": Case("qwen", "torch-dist", tensor=2, pipeline=2, layers=(3, 1)),
    "qwen-ranks": Case("qwen", "ranks", tensor=2, pipeline=2, layers=(1, 3)),
    "gpt2-ranks": Case("gpt2", "ranks", tensor=2, pipeline=2),
    "mixture-dist": Case("mixture", "torch-dist", expert=2),
    "mixture-ranks": Case("mixture", "ranks", expert=2),
}


def quiet(done: int, count: int) -> None:
    """Show nothing."""


@pytest.fixture(scope="module")
def written(megatron_checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each case: converted from megatron-core, exported, and loaded by it."""
    root, ours = tmp_path_factory.mktemp("written"), tmp_path_factory.mktemp("ours")
    for model in {case.model for case in CASES.values()}:
        from_megatron(megatron_checkpoints / model / "one/dist", ours / model, quiet)
    for name, case in CASES.items():
        layout = RankLayout(case.tensor, case.pipeline, case.expert, layers=case.layers)
        on_disk = layout if case.form == "ranks" else RankLayout()
        form = MegatronForm(case.form, on_disk, vocab_multiple=8)
        to_megatron(ours / case.model, root / name / "checkpoint", quiet, form)
        arguments = json.loads((root / name / "checkpoint/arguments.json").read_text())
        stages = (
            "|".join(("E" + "t" * case.layers[0], "t" * case.layers[1] + "L"))
            if case.layers
            else None
        )
        if case.form == "ranks":
            assert arguments["pipeline_model_parallel_layout"] == stages
        told = {
            "model": case.model,
            "format": case.form,
            "tensor": case.tensor,
            "pipeline": case.pipeline,
            "expert": case.expert,
            "layout": stages,
            "padded_vocab_size": arguments["padded_vocab_size"],
        }
        (root / name / "case.json").write_text(json.dumps(told))
    script = Path(__file__).with_name("megatron_loads.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(root)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return root


@pytest.mark.parametrize("name", CASES)
def test_megatron_has_the_scores_of_its_own_checkpoint(name, written, megatron_checkpoints):
    want = np.load(megatron_checkpoints / CASES[name].model / "logits.npy")[..., :90]
    got = np.load(written / name / "logits.npy")[..., :90]
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_what_was_written_comes_back_bit_for_bit(name, written, megatron_checkpoints, tmp_path):
    from_megatron(megatron_checkpoints / CASES[name].model / "one/dist", tmp_path / "want", quiet)
    from_megatron(written / name / "checkpoint", tmp_path / "got", quiet)
    for file in ("weights/model.safetensors", "model.toml"):
        assert (tmp_path / "got" / file).read_bytes() == (tmp_path / "want" / file).read_bytes()


SEVERAL = {
    "qwen": RankLayout(2, 2, virtual=2),
    "gpt2": RankLayout(1, 2),
    "mixture": RankLayout(1, 1, 2),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_files_of_ranks_are_those_of_megatron(name, megatron_checkpoints, tmp_path):
    from_megatron(megatron_checkpoints / name / "one/dist", tmp_path / "ours", quiet)
    form = MegatronForm("ranks", SEVERAL[name], vocab_multiple=96 // SEVERAL[name].tensor)
    to_megatron(tmp_path / "ours", tmp_path / "theirs", quiet, form)
    want = megatron_checkpoints / name / "several/classic/iter_0000007"
    got = tmp_path / "theirs/release"
    files = sorted(path.relative_to(want) for path in want.rglob("*.pt"))
    assert files == sorted(path.relative_to(got) for path in got.rglob("*.pt"))
    for file in files:
        theirs, ours = (torch.load(root / file, weights_only=False) for root in (want, got))
        for chunk in (key for key in theirs if key.startswith("model")):
            expected = {key: one for key, one in theirs[chunk].items() if one is not None}
            assert set(ours[chunk]) == {key for key in expected if "_extra_state" not in key}
            for key, tensor in ours[chunk].items():
                rows = slice(0, 90 - 48 * (file.parent.name[8:10] == "01"))
                vocab = "word_embeddings" in key or "output_layer" in key
                cut = rows if vocab else slice(None)
                assert torch.equal(tensor[cut], expected[key][cut]), (file, key)


def test_layers_of_transformer_engine_have_its_names(megatron_checkpoints, tmp_path):
    from_megatron(megatron_checkpoints / "mixture/one/dist", tmp_path / "ours", quiet)
    form = MegatronForm("ranks", RankLayout(2, 2, 2, 2), "transformer_engine", dtype="bfloat16")
    to_megatron(tmp_path / "ours", tmp_path / "theirs", quiet, form)
    file = tmp_path / "theirs/release/mp_rank_01_000_001/model_optim_rng.pt"
    loaded = torch.load(file, weights_only=False)
    names = {name for name in loaded["model1"] if name.startswith("decoder.layers.0.")}
    prefix = "decoder.layers.0."
    assert names == {
        prefix + name
        for name in (
            "self_attention.linear_qkv.layer_norm_weight",
            "self_attention.linear_qkv.weight",
            "self_attention.linear_proj.weight",
            "pre_mlp_layernorm.weight",
            "mlp.router.weight",
            "mlp.experts.local_experts.0.linear_fc1.weight",
            "mlp.experts.local_experts.1.linear_fc1.weight",
            "mlp.experts.local_experts.0.linear_fc2.weight",
            "mlp.experts.local_experts.1.linear_fc2.weight",
            "mlp.shared_experts.linear_fc1.weight",
            "mlp.shared_experts.linear_fc2.weight",
            "mlp.shared_experts.gate_weight",
        )
    }
    assert {tensor.dtype for tensor in loaded["model1"].values()} == {torch.bfloat16}
    from_megatron(tmp_path / "theirs", tmp_path / "back", quiet)
    ours, back = (open_weight_files(tmp_path / one / "weights") for one in ("ours", "back"))
    assert ours.names == back.names
    for name in ours.names:
        assert np.array_equal(ours.read(name).astype(back.dtype(name)), back.read(name)), name
