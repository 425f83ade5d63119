"""Adapters of peft, there and back: logits, gradients, and the arrays themselves."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from unoptimized import OPTIONS

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Adapter, Batch, Mesh, Program
from graphtrain.errors import WeightsError
from graphtrain.models.decoder import forward
from graphtrain.models.lora.layers import apply_lora
from graphtrain.models.lora.trainable import (
    LORA_A,
    LORA_B,
    frozen_arrays,
    lora_paths,
    trained_arrays,
)
from graphtrain.models.loss import cross_entropy
from graphtrain.weights.factors import AdapterTable, from_peft, weights_of_layers
from graphtrain.weights.families import family_of_config
from graphtrain.weights.frozen import load_frozen_parameters
from graphtrain.weights.hf_files import read_config
from graphtrain.weights.hf_import import import_hugging_face
from graphtrain.weights.peft_export import write_peft_folder
from graphtrain.weights.peft_import import PeftAdapter
from graphtrain.weights.sources import ConvertedFolder
from lowering.trees import flatten, unflatten

# Of peft and transformers to each other.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)

RANK = 3
SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = SIZES | {"num_key_value_heads": 2, "intermediate_size": 48}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CASES = {
    "llama": ("Llama", LLAMA, ["q_proj", "o_proj", "down_proj"]),
    "gpt2": ("GPT2", GPT2 | DROPOUT, ["c_attn", "c_fc", "mlp.c_proj"]),
    "bloom": (
        "Bloom",
        {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}
        | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        ["query_key_value", "dense"],
    ),
    "deepseek": (  # a dense layer before a mixture, and latents
        "DeepseekV3",
        LLAMA
        | {"num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": 28, "v_head_dim": 12}
        | {"qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "n_routed_experts": 4, "n_group": 2}
        | {"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"first_k_dense_replace": 1, "num_mtp_layers": 0},
        ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"],
    ),
}
# As modules, PEFT 0.21 would take them for the experts.
PARAMETERS = {
    "deepseek": [
        f"mlp.{name}.weight" for name in ("down_proj", "up_proj", "shared_experts.up_proj")
    ]
}
MIXTURE = (
    "Mixtral",
    LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ["q_proj"],
)
TARGETS = {
    "llama": ("attention/query", "attention/output", "mlp/down"),
    "gpt2": ("attention/query", "attention/key", "attention/value", "mlp/*"),
    "bloom": ("attention/*",),
    "deepseek": (
        *("attention/query_*", "attention/k*", "attention/value_up"),
        *("dense_layers/mlp/down", "dense_layers/mlp/up", "mlp/shared_up"),
    ),
}
# Of one module, not all layers adapt as many weights: it is named by its full name.
ROUND_TRIPS = TARGETS | {
    "deepseek": (*TARGETS["deepseek"][:2], "layers/attention/value_up", *TARGETS["deepseek"][3:])
}
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 12))


def base(case: str, path: Path) -> torch.nn.Module:
    kind, settings, _ = MIXTURE if case == "mixtral" else CASES[case]
    config = getattr(transformers, f"{kind}Config")(**settings)
    name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, name)(config)
    for parameter in model.parameters():
        parameter.data = float(parameter.ndim == 1) + 0.2 * torch.randn(parameter.shape)
    if kind == "DeepseekV3":
        model.set_experts_implementation("eager")  # the others have no float64
    model.save_pretrained(path / "source")
    import_hugging_face(path / "source", path / "ours", lambda done, count: None)
    return model


def with_adapter(model: torch.nn.Module, case: str, path: Path, **settings) -> torch.nn.Module:
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=5,
        target_modules=CASES[case][2],
        target_parameters=PARAMETERS.get(case),
        task_type="CAUSAL_LM",
        **settings,
    )
    tuned = peft.get_peft_model(model, config)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape)
    tuned.save_pretrained(path / "adapter")
    return tuned.eval()


def program_of(path: Path, **settings) -> Program:
    model = replace(ConvertedFolder(path / "ours").model, dtype="float32", remat="none")
    if model.moe is not None:
        frozen = None if model.moe.bias_update_rate is None else 0.0
        model = replace(model, moe=replace(model.moe, bias_update_rate=frozen))
    adapter = Adapter(**{"rank": RANK, "alpha": 5.0} | settings)
    return Program(
        mesh=Mesh(), model=model, batch=Batch(global_batch_size=2, seq_len=12), adapter=adapter
    )


def frozen_of(path: Path, program: Program):
    described = unflatten(frozen_arrays(resolve(program)))

    def fill(described, read):
        return unflatten(
            {
                name: read(name, spec.shape, tuple(map(slice, spec.shape)))
                for name, spec in flatten(described).items()
            }
        )

    return load_frozen_parameters(ConvertedFolder(path / "ours"), resolve(program), described, fill)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_peft(case, tmp_path):
    tuned = with_adapter(base(case, tmp_path), case, tmp_path).double()
    program = program_of(tmp_path, target_modules=TARGETS[case])
    side = tmp_path / "ours/hugging_face"
    adapter = PeftAdapter(tmp_path / "adapter", program, side)
    frozen = frozen_of(tmp_path, program)
    targets, weights = np.roll(TOKENS, -1, 1), np.ones(TOKENS.shape, np.float32)

    def loss(trained):
        out = forward(program.model, apply_lora(program, trained, frozen), TOKENS)[0]
        return cross_entropy(out, targets, weights)[0], out

    (_, got), gradients = quickly(jax.value_and_grad(loss, has_aux=True))(unflatten(adapter.arrays))
    want = tuned(torch.tensor(TOKENS)).logits
    assert_close(got, want.detach().numpy())
    torch.nn.functional.cross_entropy(
        want.flatten(0, 1), torch.tensor(targets).ravel(), reduction="sum"
    ).backward()
    assert_gradients(program, side, flatten(gradients), tuned)


def quickly(function):
    """Compiled in less time than by default."""
    return jax.jit(function, compiler_options=OPTIONS)


def assert_gradients(program, side, got, tuned):
    """Where PEFT packs several weights into one, its first factor has the sum of our gradients."""
    family = family_of_config(read_config(side))
    theirs = {name: one.grad for name, one in tuned.named_parameters() if "lora_" in name}
    compared = 0
    for piece in weights_of_layers(family, program.model):
        paths = [path for path in piece.row.paths if f"{path}/{LORA_A}" in got]
        if not paths:
            continue
        module = "base_model.model." + piece.names[0].removesuffix(".weight")
        first, second = (
            theirs[f"{module}.lora_{name}.default.weight"].numpy() for name in ("A", "B")
        )
        want = from_peft(piece, first, second, program.model)
        total = sum(got[f"{path}/{LORA_A}"][piece.layer] for path in paths)
        assert_close(total, want[paths[0]][0])
        for path in paths:
            assert_close(got[f"{path}/{LORA_B}"][piece.layer], want[path][1])
            compared += 1
    paths = lora_paths(program.model, program.adapter)
    assert compared == sum(len(got[f"{path}/{LORA_A}"]) for path in paths)


@pytest.mark.parametrize(
    ("case", "use_rslora"),
    [("llama", False), ("gpt2", True), ("bloom", False), ("deepseek", False)],
)
def test_an_adapter_goes_to_peft_and_comes_back_bit_for_bit(case, use_rslora, tmp_path):
    base(case, tmp_path)
    tied = ConvertedFolder(tmp_path / "ours").model.tie_word_embeddings
    whole = ("embedding/tokens",) if tied else ("head", "final_norm/*")
    program = program_of(
        tmp_path, use_rslora=use_rslora, target_modules=ROUND_TRIPS[case], modules_to_save=whole
    )
    random = np.random.default_rng(1)
    ours = {
        path: random.normal(0, 0.2, spec.shape).astype(np.float32)
        for path, spec in trained_arrays(program).items()
    }
    side = tmp_path / "ours/hugging_face"
    assert program.adapter is not None

    def read(paths, layer):
        return [ours[path] if layer is None else ours[path][layer] for path in paths]

    write_peft_folder(
        AdapterTable.from_folder(side, program.model, program.adapter), read, tmp_path / "written"
    )
    again = PeftAdapter(tmp_path / "written", program, side)
    assert set(again.arrays) == set(ours)
    for path, array in ours.items():
        np.testing.assert_array_equal(again.arrays[path], array, err_msg=path)

    # peft computes with the folder what we compute with the arrays.
    source = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    if case == "deepseek":
        source.set_experts_implementation("eager")
    loaded = peft.PeftModel.from_pretrained(source, tmp_path / "written").double().eval()
    with torch.no_grad():
        want = loaded(torch.tensor(TOKENS)).logits.numpy()
    weights = apply_lora(program, unflatten(ours), frozen_of(tmp_path, program))
    assert_close(quickly(lambda tree: forward(program.model, tree, TOKENS)[0])(weights), want)


EXPERTS = ("attention/query", "mlp/gate", "mlp/up", "mlp/down")


# PEFT 0.21 looks for patterns of ranks among modules, and says that it ignores those of parameters;
# the equal logits show that it does not.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
def test_factors_of_experts_go_to_peft_and_come_back_bit_for_bit(tmp_path):
    base("mixtral", tmp_path)
    program = program_of(tmp_path, target_modules=EXPERTS)
    random = np.random.default_rng(1)
    ours = {
        path: random.normal(0, 0.2, spec.shape).astype(np.float32)
        for path, spec in trained_arrays(program).items()
    }
    side = tmp_path / "ours/hugging_face"

    def read(paths, layer):
        return [ours[path][layer] for path in paths]

    table = AdapterTable.from_folder(side, program.model, program.adapter)
    write_peft_folder(table, read, tmp_path / "written")
    again = PeftAdapter(tmp_path / "written", program, side)
    assert set(again.arrays) == set(ours)
    for path, array in ours.items():
        np.testing.assert_array_equal(again.arrays[path], array, err_msg=path)
    source = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "source", experts_implementation="eager"
    )
    loaded = peft.PeftModel.from_pretrained(source, tmp_path / "written").double().eval()
    assert_same_logits(program, ours, loaded, tmp_path)


def test_factors_of_experts_come_from_peft(tmp_path):
    model = base("mixtral", tmp_path)
    model.set_experts_implementation("eager")  # the others have no float64
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=7,
        target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    tuned = peft.get_peft_model(model, config)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape)
    tuned.save_pretrained(tmp_path / "adapter")
    program = program_of(tmp_path, target_modules=EXPERTS)
    side = tmp_path / "ours/hugging_face"
    adapter = PeftAdapter(tmp_path / "adapter", program, side)
    assert_same_logits(program, adapter.arrays, tuned.double().eval(), tmp_path)

    for targets, words in (
        (EXPERTS[:2] + EXPERTS[3:], "adapts more than layers/mlp/gate"),
        (EXPERTS[:3], "adapts more parameters of experts than .program.adapter."),
    ):
        with pytest.raises(WeightsError, match=words):
            PeftAdapter(tmp_path / "adapter", program_of(tmp_path, target_modules=targets), side)


def assert_same_logits(program, arrays, theirs, path):
    with torch.no_grad():
        want = theirs(torch.tensor(TOKENS)).logits.numpy()
    weights = apply_lora(program, unflatten(arrays), frozen_of(path, program))
    assert_close(quickly(lambda tree: forward(program.model, tree, TOKENS)[0])(weights), want)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"rank": 4}, r"q_proj has rank 3, but program.adapter.rank = 4; set it to 3"),
        (
            {"target_modules": ("attention/query",)},
            r"also contains .*lora_A.*add them to its target_modules",
        ),
        ({"target_modules": ("attention/*", "mlp/down")}, r"has no .*k_proj.*remove it"),
    ],
)
def test_an_adapter_of_other_settings_is_refused(settings, error, tmp_path):
    with_adapter(base("llama", tmp_path), "llama", tmp_path)
    program = program_of(tmp_path, **{"target_modules": TARGETS["llama"]} | settings)
    with pytest.raises(WeightsError, match=error):
        PeftAdapter(tmp_path / "adapter", program, tmp_path / "ours/hugging_face")


def test_an_adapter_of_another_model_or_a_damaged_one_is_refused(tmp_path):
    with_adapter(base("llama", tmp_path), "llama", tmp_path, modules_to_save=["lm_head"])
    program = program_of(tmp_path, target_modules=TARGETS["llama"], modules_to_save=("head",))
    adapter, side = tmp_path / "adapter", tmp_path / "ours/hugging_face"
    PeftAdapter(adapter, program, side)
    weights = adapter / "adapter_model.safetensors"
    tensors, config = load_file(weights), (adapter / "adapter_config.json").read_text()
    for name, shape in {
        "lora_A": r"\[3, 7\].*\[3, 32\]",
        "lm_head": r"\[61, 7\].*\[61, 32\]",
    }.items():
        cut = {key: one[:, :7] if name in key else one for key, one in tensors.items()}
        save_file({key: np.ascontiguousarray(one) for key, one in cut.items()}, weights)
        with pytest.raises(WeightsError, match=shape):
            PeftAdapter(adapter, program, side)
    save_file(tensors, weights)
    for damage in ("[]", "3", config.replace('"lora_alpha": 5', '"lora_alpha": null')):
        (adapter / "adapter_config.json").write_text(damage)
        with pytest.raises(WeightsError, match=r"adapter_config\.json"):
            PeftAdapter(adapter, program, side)


def test_what_graphtrain_has_not_is_refused_by_name(tmp_path):
    with_adapter(base("llama", tmp_path), "llama", tmp_path, use_dora=True)
    program = program_of(tmp_path, target_modules=TARGETS["llama"])
    with pytest.raises(WeightsError, match="use_dora = True"):
        PeftAdapter(tmp_path / "adapter", program, tmp_path / "ours/hugging_face")


def assert_close(got, want):
    """To 1e-5 of the largest."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
