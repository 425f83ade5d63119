"""LoRA adapters of a server: which folders are read, and what is refused by name."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from programs import LLAMA
from safetensors.numpy import save_file

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import (
    Batch,
    Data,
    Mesh,
    Program,
    Run,
    Serve,
    TorchModel,
)
from graphtrain.errors import TrainingError, WeightsError
from graphtrain.run.serving import adapters as adapters_of_server
from graphtrain.run.serving.adapters import open_adapters
from graphtrain.weights.named_adapters import ServedBase, joined_factors, rank_intervals

BOTH = {"q_proj": (32, 32), "v_proj": (16, 32)}  # (out, in) of LLAMA
ROOM = Serve(total_adapter_rank=8)


def program_of(serve: Serve = ROOM) -> Program:
    batch = Batch(global_batch_size=8, seq_len=16)
    return Program(mesh=Mesh(), model=LLAMA, batch=batch, serve=serve)


def save_adapter(
    folder: Path,
    rank: int = 2,
    modules: dict[str, tuple[int, int]] = BOTH,
    extra: dict[str, np.ndarray] | None = None,
    **config,
) -> Path:
    """A folder as PEFT writes it, with random factors."""
    folder.mkdir()
    random, tensors = np.random.default_rng(rank), dict(extra or {})
    for layer in range(2):
        for module, (outputs, inputs) in modules.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = random.standard_normal((rank, inputs), np.float32)
            tensors[f"{name}.lora_B.weight"] = random.standard_normal((outputs, rank), np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 4 * rank} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def opened(path: Path, serve: Serve = ROOM, **folders: Path):
    run = Run(directory=str(path / "run"), steps=1, data=Data(train="data"))
    program = resolve(program_of(serve))
    return open_adapters(program, run, None, folders, "graphtrain compile RUN", pytest.fail)


def test_ranks_lie_side_by_side_with_the_scale_in_the_second_factor(tmp_path):
    first = save_adapter(tmp_path / "first", 2)
    second = save_adapter(tmp_path / "second", 4, {"q_proj": (32, 32)}, use_rslora=True)
    adapters = opened(tmp_path, first=first, second=second)
    assert rank_intervals(adapters) == {"first": (0, 2), "second": (2, 6)}
    arrays = joined_factors(adapters, program_of())
    query_a, query_b = (arrays[f"layers/attention/query/lora_{letter}"] for letter in "ab")
    assert query_a.shape == (2, 32, 8) and query_b.shape == (2, 8, 4, 8)
    assert not query_a[..., 6:].any() and not query_b[:, 6:].any()
    value_a = arrays["layers/attention/value/lora_a"]
    assert value_a[..., :2].all() and not value_a[..., 2:].any()
    assert not arrays["layers/mlp/up/lora_a"].any()
    random = np.random.default_rng(4)
    shapes = ((4, 32), (32, 4)) * 2
    *_, lora_a, lora_b = (random.standard_normal(shape, np.float32) for shape in shapes)
    product = np.tensordot(query_a[1, :, 2:6], query_b[1, 2:6], 1).reshape(32, 32)
    # The decoder's heads have their rotary halves in another order than Hugging Face's, if any.
    expected = 16 / 4**0.5 * lora_b @ lora_a
    np.testing.assert_allclose(np.linalg.norm(product), np.linalg.norm(expected), 1e-5)
    np.testing.assert_allclose(np.sort(product.ravel()), np.sort(expected.ravel()), 1e-4, 1e-4)


@pytest.mark.parametrize(
    ("ranks", "error"),
    [
        ([9], "the rank of the adapters is 9 (a), and program.serve.total_adapter_rank = 8; set "
              "it to at least 9, and compile: graphtrain compile RUN"),
        ([6, 3], "the rank of the adapters is 6 (a) + 3 (b) = 9, and"),
    ],
)  # fmt: skip
def test_more_ranks_than_the_programs_have_are_refused(ranks, error, tmp_path):
    folders = {
        name: save_adapter(tmp_path / name, rank) for name, rank in zip("ab", ranks, strict=False)
    }
    with pytest.raises(WeightsError, match=re.escape(error)):
        opened(tmp_path, **folders)


def test_programs_without_adapters_say_what_to_set(tmp_path):
    folder = save_adapter(tmp_path / "a", 2)
    with pytest.raises(WeightsError, match=r"total_adapter_rank = 0; set it to at least 2"):
        opened(tmp_path, Serve(), a=folder)


def test_matrices_that_the_programs_leave_out_are_refused(tmp_path):
    folder = save_adapter(tmp_path / "a")
    serve = replace(ROOM, adapter_target_modules=("attention/query",))
    error = r"'a' adapts layers/attention/value, which program.serve.adapter_target_modules = "
    with pytest.raises(WeightsError, match=error):
        opened(tmp_path, serve, a=folder)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"modules": {"q_proj": (64, 64)}}, "shape .* the adapter belongs to another model"),
        ({"modules": {"query_key_value": (64, 64)}}, "belongs to another model, or adapts more"),
        (
            {"extra": {"base_model.model.lm_head.weight": np.ones((64, 32), np.float32)}},
            r"contains lm_head.weight: weights that were trained in full \(modules_to_save\)",
        ),
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"alora_invocation_tokens": [5, 7]}, r"alora_invocation_tokens = \[5, 7\] is not"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config = .* is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' changes the base weights; save"),
        ({"modules": {}, "extra": {}}, "has no LoRA factors"),
        ({"lora_alpha": float("inf")}, "not finite|adapter_config.json cannot be read"),
    ],
)
def test_what_cannot_be_served_beside_a_base_is_refused(settings, error, tmp_path):
    folder = save_adapter(tmp_path / "a", **settings)
    with pytest.raises(WeightsError, match=f"adapter 'a': .*{error}"):
        opened(tmp_path, a=folder)


def test_a_folder_of_neither_kind_is_refused(tmp_path):
    with pytest.raises(WeightsError, match=r"adapter 'a': .* neither a folder of PEFT"):
        opened(tmp_path, a=tmp_path)


def test_a_base_without_weights_is_refused_before_an_adapter_is_compared(tmp_path, monkeypatch):
    def read(name: str, directory: Path, base: ServedBase):
        base.open_weights()  # as for an adapter of a run

    monkeypatch.setattr(adapters_of_server, "read_adapter", read)
    with pytest.raises(TrainingError, match=r"no checkpoint in .*: the run is not trained yet"):
        opened(tmp_path, a=tmp_path)


def test_an_imported_model_has_no_room_for_adapters():
    model = TorchModel(hf=str(Path(__file__).parents[2] / "examples/hf-llama"))
    with pytest.raises(ValueError, match=r"serve.total_adapter_rank cannot be used with model"):
        Program(model=model, batch=Batch(global_batch_size=8, seq_len=16), serve=ROOM)
