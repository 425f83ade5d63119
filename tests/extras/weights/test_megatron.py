"""Megatron's checkpoints give the decoder the scores that megatron-core computes."""

import pickle
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from graphtrain.errors import WeightsError
from graphtrain.models.decoder import forward, parameter_specs
from graphtrain.weights.hf_export import export_hugging_face
from graphtrain.weights.megatron.arguments import model_from_arguments
from graphtrain.weights.megatron.convert import from_megatron
from graphtrain.weights.sources import ConvertedFolder
from lowering.trees import flatten, unflatten

CASES = ("qwen", "gpt2", "mixture")
LEGACY = (
    ("embedding.", "language_model.embedding."),
    ("output_layer.", "language_model.output_layer."),
    ("decoder.", "language_model.encoder."),
    ("final_layernorm", "final_norm"),
    ("linear_qkv", "query_key_value"),
    ("linear_proj", "dense"),
    ("linear_fc1", "dense_h_to_4h"),
    ("linear_fc2", "dense_4h_to_h"),
    ("pre_mlp_layernorm", "post_attention_norm"),
    ("input_layernorm", "input_norm"),
)


def quiet(done: int, count: int) -> None:
    """Show nothing."""


def scores(directory: Path, tokens: np.ndarray) -> np.ndarray:
    converted = ConvertedFolder(directory)
    parameters = {}
    for path in flatten(parameter_specs(converted.model)):
        layers = range(converted.model.layers) if path.startswith("layers/") else [None]
        parts = [converted.read([path], layer)[0] for layer in layers]
        parameters[path] = jnp.asarray(np.stack(parts) if len(layers) > 1 else parts[0])
    model = replace(converted.model, dtype="float32", remat="none")
    with jax.default_matmul_precision("highest"):
        return np.asarray(forward(model, unflatten(parameters), jnp.asarray(tokens))[0])


@pytest.mark.parametrize("name", CASES)
def test_every_layout_has_the_scores_of_megatron(name, megatron_checkpoints, tmp_path):
    tokens, want = (
        np.load(megatron_checkpoints / one) for one in ("tokens.npy", f"{name}/logits.npy")
    )
    from_megatron(megatron_checkpoints / name / "one/dist", tmp_path / "first", quiet)
    got = scores(tmp_path / "first", tokens)
    np.testing.assert_allclose(got, want[..., :90], atol=1e-5 * np.abs(want).max(), rtol=0)
    held = (tmp_path / "first/weights/model.safetensors").read_bytes()
    for layout in ("one/classic", "several/dist", "several/classic"):
        from_megatron(megatron_checkpoints / name / layout, tmp_path / layout, quiet)
        assert (tmp_path / layout / "weights/model.safetensors").read_bytes() == held, layout


def test_names_from_before_megatron_core(megatron_checkpoints, tmp_path):
    source = megatron_checkpoints / "qwen/several/classic"
    shutil.copytree(source, tmp_path / "legacy")
    for path in (tmp_path / "legacy").rglob("*.pt"):
        loaded = torch.load(path, weights_only=False)
        for chunk in ("model0", "model1"):
            loaded[chunk] = nested(loaded[chunk])
        torch.save(loaded, path)
    from_megatron(tmp_path / "legacy", tmp_path / "old", quiet)
    from_megatron(source, tmp_path / "new", quiet)
    old, new = (tmp_path / one / "weights/model.safetensors" for one in ("old", "new"))
    assert old.read_bytes() == new.read_bytes()


def nested(tensors: dict) -> dict:
    """As Megatron-LM 2 and 3 name them: dictionaries in dictionaries."""
    made: dict = {}
    for name, tensor in tensors.items():
        for new, old in LEGACY:
            name = name.replace(new, old)
        *outer, last = name.split(".", 2) if name.startswith("language_model.") else (name,)
        node = made
        for one in outer:
            node = node.setdefault(one, {})
        node[last] = tensor
    return made


def test_what_comes_from_megatron_goes_to_hugging_face(megatron_checkpoints, tmp_path):
    tokens = np.load(megatron_checkpoints / "tokens.npy")
    want = np.load(megatron_checkpoints / "gpt2/logits.npy")[..., :90]
    from_megatron(megatron_checkpoints / "gpt2/several/classic", tmp_path / "ours", quiet)
    export_hugging_face(tmp_path / "ours", tmp_path / "theirs", quiet)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        got = model(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=0)


ARGUMENTS = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "ffn_hidden_size": 24,
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 40,
}
SIZES = {
    "input_layernorm.weight": (16,),
    "pre_mlp_layernorm.weight": (16,),
    "self_attention.linear_qkv.weight": (48, 16),
    "self_attention.linear_proj.weight": (16, 16),
    "mlp.linear_fc1.weight": (48, 16),
    "mlp.linear_fc2.weight": (16, 24),
}


def write(directory: Path, drop: str = "", **changed) -> Path:
    """A checkpoint of one rank, made here."""
    names = {f"decoder.layers.{i}.{name}": size for i in range(2) for name, size in SIZES.items()}
    names |= {f"{one}.weight": (48, 16) for one in ("embedding.word_embeddings", "output_layer")}
    names |= {"decoder.final_layernorm.weight": (16,)}
    tensors = {name: torch.randn(size) for name, size in names.items() if name != drop}
    loaded = {"args": Namespace(**ARGUMENTS), "checkpoint_version": 3.0, "model": tensors} | changed
    loaded = {name: value for name, value in loaded.items() if value is not None}
    path = directory / "iter_0000010/mp_rank_00/model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    torch.save(loaded, path)
    (directory / "latest_checkpointed_iteration.txt").write_text("10")
    return directory


def refused(source: Path, **options) -> str:
    with pytest.raises(WeightsError) as error:
        from_megatron(source, source.with_name("ours"), quiet, **options)
    assert not source.with_name("ours").exists()
    return str(error.value)


def test_the_vocabulary_loses_its_padding(tmp_path):
    made = from_megatron(write(tmp_path / "source"), tmp_path / "cut", quiet)
    assert ConvertedFolder(tmp_path / "cut").model.vocab == 40
    more = from_megatron(tmp_path / "source", tmp_path / "more", quiet, vocab=44)
    assert more.parameters - made.parameters == 4 * 16 * 2
    assert "a vocabulary of 49 exceeds the 48 rows in the checkpoint" in refused(
        tmp_path / "source", vocab=49
    )


def test_a_checkpoint_without_arguments_asks_for_the_model(tmp_path):
    source = write(tmp_path / "source", args=None)
    assert "does not contain Megatron-LM's args" in refused(source) and "--model PRESET" in refused(
        source
    )
    assert "the checkpoint lacks" in refused(source, model="gpt2")
    from_megatron(write(tmp_path / "known"), tmp_path / "told", quiet)
    from_megatron(source, tmp_path / "named", quiet, model=str(tmp_path / "told/model.toml"))
    assert ConvertedFolder(tmp_path / "named").model == ConvertedFolder(tmp_path / "told").model


def test_a_checkpoint_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return Path(tmp_path / "ran").touch, ()

    assert "cannot be loaded with weights_only=True" in refused(
        write(tmp_path / "evil", rng_state=Evil())
    )
    dist = tmp_path / "dist"
    dist.mkdir()
    (dist / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert "is not a complete pickle" in refused(dist)
    (dist / ".metadata").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    assert "does not list arrays and their chunks" in refused(dist)
    assert not (tmp_path / "ran").exists()


def test_what_is_not_read_is_refused_by_name(tmp_path):
    lacks = "decoder.layers.1.mlp.linear_fc2.weight"
    assert lacks in refused(write(tmp_path / "lacks", drop=lacks))
    assert "checkpoint_version = 1" in refused(write(tmp_path / "old", checkpoint_version=1))
    source = write(tmp_path / "part")
    (source / "iter_0000010/mp_rank_01_001").mkdir()
    assert "contains none of model_optim_rng.pt" in refused(source)
    shutil.copy(
        source / "iter_0000010/mp_rank_00/model_optim_rng.pt",
        source / "iter_0000010/mp_rank_01_001",
    )
    assert "no folder for tensor rank 1, pipeline rank 0" in refused(source)
    whole = (source / "iter_0000010/mp_rank_00/model_optim_rng.pt").read_bytes()
    cut = write(tmp_path / "cut") / "iter_0000010/mp_rank_00/model_optim_rng.pt"
    cut.write_bytes(whole[:-2000])
    assert "cannot be loaded with weights_only=True" in refused(tmp_path / "cut")
    assert "is not a checkpoint of Megatron-LM" in refused(tmp_path / "cut/iter_0000010/mp_rank_00")
    with pytest.raises(
        WeightsError, match=r"rotary_interleaved = True is not supported, only False is"
    ):
        model_from_arguments(ARGUMENTS | {"rotary_interleaved": True}, 48)


def test_arguments_of_all_ages_say_the_same_model():
    old = {name: value for name, value in ARGUMENTS.items() if not name.startswith(("add", "pos"))}
    old |= {"disable_bias_linear": True, "use_rotary_position_embeddings": True}
    old |= {"position_embedding_type": "learned_absolute"}
    assert model_from_arguments(old, 48) == model_from_arguments(ARGUMENTS, 48)
    biased = model_from_arguments(ARGUMENTS | {"swiglu": False, "bias_gelu_fusion": False}, 48)
    assert biased.activation == "gelu"
    scaled = model_from_arguments(
        ARGUMENTS | {"use_rope_scaling": True, "rope_scaling_factor": 32.0}, 48
    )
    assert scaled.rope_scaling is not None and scaled.rope_scaling.factor == 32.0


def test_values_that_are_not_finite_are_refused_by_name(tmp_path):
    source = write(tmp_path / "source")
    path = source / "iter_0000010/mp_rank_00/model_optim_rng.pt"
    loaded = torch.load(path, weights_only=False)
    loaded["model"]["decoder.layers.1.mlp.linear_fc2.weight"][2, 3] = torch.nan
    torch.save(loaded, path)
    expected = "1 of 384 values of decoder.layers.1.mlp.linear_fc2.weight are NaN or infinite"
    assert expected in refused(source)
