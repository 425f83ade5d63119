"""Every family: there, logits and all gradients as the reference's, back, and bit for bit the same.

The reference computes in float64, the decoder in float32.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
import torch
import transformers
from safetensors.torch import load_file, save_file

from graphtrain.config.schema import Model
from graphtrain.models.decoder import forward, parameter_specs
from graphtrain.weights.families import (
    FAMILIES,
    family_of_config,
    family_of_model,
    functional_settings,
)
from graphtrain.weights.families.family import to_decoder
from graphtrain.weights.hf_export import export_hugging_face
from graphtrain.weights.hf_files import read_config
from graphtrain.weights.hf_import import import_hugging_face
from graphtrain.weights.sources import ConvertedFolder
from lowering.trees import flatten, unflatten

LAYERS, EMBED, HEADS, KV_HEADS, MLP, VOCAB, LENGTH = 3, 48, 6, 2, 80, 96, 24
random = np.random.default_rng(0)
TOKENS = random.integers(0, VOCAB, (2, LENGTH))
TARGETS = random.integers(0, VOCAB, (2, LENGTH))

SIZES: dict[str, Any] = {
    "hidden_size": EMBED,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "attn_implementation": "eager",
}
GPT2: dict[str, Any] = {
    "n_embd": EMBED, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 32, "vocab_size": VOCAB,
    "attn_implementation": "eager",
}  # fmt: skip
BLOOM: dict[str, Any] = {
    "hidden_size": EMBED, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": VOCAB,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = YARN | {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 1.5, 3.0, 4.0],
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA: dict[str, Any] = SIZES | {
    "head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 5, "layer_types": WINDOWS,
    "pad_token_id": None,  # whose row of the embedding PyTorch would give no gradient
}  # fmt: skip
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
EXPERTS: dict[str, Any] = SIZES | {"num_experts_per_tok": 2, "experts_implementation": "eager"}


DEEPSEEK: dict[str, Any] = (
    EXPERTS
    | {"num_key_value_heads": HEADS, "kv_lora_rank": 20, "q_lora_rank": 28, "v_head_dim": 12}
    | {"qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "n_routed_experts": 8, "n_group": 4}
    | {"topk_group": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "num_mtp_layers": 0}
    | {"first_k_dense_replace": 1, "rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 1.2}}
)


@dataclass(frozen=True)
class Case:
    """A model of transformers by name and settings, or a module and its config.json."""

    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    module: Callable[[], torch.nn.Module] | None = None
    config: dict[str, Any] = field(default_factory=dict)  # over what transformers writes

    def build(self) -> torch.nn.Module:
        if self.module is not None:
            return self.module()
        config = getattr(transformers, f"{self.name}Config")(**self.settings)
        return transformers.AutoModelForCausalLM.from_config(config)


OWN: dict[str, Any] = {
    "layers": LAYERS, "embed": EMBED, "heads": HEADS, "kv_heads": HEADS, "mlp": MLP, "vocab": VOCAB,
}  # fmt: skip
BAICHUAN = {name: SIZES[name] for name in SIZES if name not in ("num_key_value_heads",)}
CASES = {
    "llama": Case("Llama", SIZES | {"num_key_value_heads": HEADS}),
    "llama 3": Case("Llama", SIZES | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, linear": Case(
        "Llama",
        SIZES
        | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}}
        | {"hidden_act": "gelu", "head_dim": 16},
    ),
    "llama, yarn": Case("Llama", SIZES | {"rope_parameters": YARN}),
    "llama, longrope": Case("Llama", SIZES | {"rope_parameters": LONGROPE}),
    "llama, longrope within its original length": Case(
        "Llama",
        SIZES | {"rope_parameters": LONGROPE | {"original_max_position_embeddings": LENGTH}},
    ),
    "llama, dynamic": Case(
        "Llama",
        SIZES
        | {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 100.0}}
        | {"max_position_embeddings": 16},
    ),
    "mistral": Case("Mistral", SIZES | {"sliding_window": 7, "head_dim": 16}),
    "qwen2": Case("Qwen2", SIZES | {"tie_word_embeddings": True}),
    "qwen2, windows": Case(
        "Qwen2", SIZES | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
    ),
    "qwen3": Case("Qwen3", SIZES | {"head_dim": 16}),
    "gpt2": Case("GPT2", GPT2),
    "bloom": Case("Bloom", BLOOM),
    "gemma 2": Case(
        "Gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    ),
    "gemma 3": Case("Gemma3Text", GEMMA | {"rope_parameters": GEMMA3_ROPES}),
    "mixtral": Case("Mixtral", EXPERTS | {"num_local_experts": 4, "sliding_window": None}),
    "qwen2 mixture": Case(
        "Qwen2Moe",
        EXPERTS
        | {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40},
    ),
    "qwen3 mixture": Case(
        "Qwen3Moe",
        EXPERTS
        | {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True},
    ),
    "glm": Case("Glm", SIZES | {"head_dim": 16, "pad_token_id": None}),
    "glm4": Case(
        "Glm4",
        SIZES | {"head_dim": 12, "pad_token_id": None, "partial_rotary_factor": 2 / 3},
    ),
    "gpt-oss": Case(
        "GptOss",
        EXPERTS
        | {"num_local_experts": 4, "head_dim": 8, "sliding_window": 5, "layer_types": WINDOWS}
        | {"rope_parameters": YARN | {"truncate": False}},
    ),
    "glm4 mixture": Case(
        "Glm4Moe",
        EXPERTS
        | {"n_routed_experts": 8, "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2}
        | {"n_shared_experts": 2, "routed_scaling_factor": 2.5, "head_dim": 8, "use_qk_norm": True}
        | {"first_k_dense_replace": 2, "num_mtp_layers": 0, "attention_bias": True},
    ),
    "deepseek v3": Case("DeepseekV3", DEEPSEEK),
    "kimi k2, a deepseek v3; queries without a latent": Case(
        "DeepseekV3",
        DEEPSEEK | {"q_lora_rank": None, "rope_parameters": None},
        config={"model_type": "kimi_k2"},
    ),
    "aquila": Case("Llama", SIZES, config={"model_type": "aquila"}),
    "internlm": Case(
        "Llama",
        SIZES | {"num_key_value_heads": HEADS, "attention_bias": True},
        config={"model_type": "internlm", "bias": True},
    ),
    "internlm2": Case(
        module=lambda: references.internlm2(OWN | {"kv_heads": KV_HEADS}),
        config=SIZES | {"model_type": "internlm2", "bias": False, "rms_norm_eps": 1e-6},
    ),
    "baichuan 7b": Case(
        module=lambda: references.baichuan(OWN, alibi=False, unit_head=False),
        config=BAICHUAN | {"model_type": "baichuan", "max_position_embeddings": 4096},
    ),
    "baichuan2 13b": Case(
        module=lambda: references.baichuan(OWN, alibi=True, unit_head=True),
        config=BAICHUAN | {"model_type": "baichuan", "model_max_length": 4096, "z_loss_weight": 0},
    ),
}  # fmt: skip


def assert_same_weights(got: torch.nn.Module, want: torch.nn.Module) -> None:
    found, wanted = got.state_dict(), want.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name].to(tensor.dtype), tensor), name


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")
@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case, tmp_path):
    reference = randomised(CASES[case].build())
    save(reference, CASES[case], tmp_path / "source")
    import_hugging_face(tmp_path / "source", tmp_path / "ours", quiet)
    converted = ConvertedFolder(tmp_path / "ours")
    model = replace(converted.model, dtype="float32")

    want, gradients = reference_gradients(reference.double(), read_config(tmp_path / "source"))
    got, got_gradients = scores_and_gradients(model, stacked(converted), TOKENS, TARGETS)
    assert_close(got, want, "logits")
    assert jax.tree.structure(got_gradients) == jax.tree.structure(parameter_specs(model))
    for path, array in flatten(got_gradients).items():
        assert_close(array, gradients[path], path)

    export_hugging_face(tmp_path / "ours", tmp_path / "back", quiet)
    assert_same_files(tmp_path / "source", tmp_path / "back")
    again = CASES[case].build() if CASES[case].module or CASES[case].config else load(tmp_path)
    if CASES[case].module:
        again.load_state_dict(tensors(tmp_path / "back"))
    elif CASES[case].config:  # whose model_type is not that of transformers
        again = type(again).from_pretrained(tmp_path / "back", config=again.config, dtype="auto")
    assert_same_weights(again, reference)
    with torch.no_grad():  # the last bits of a product depend on where its arrays lie in memory
        scores = logits_of(again.float().eval())
        torch.testing.assert_close(scores, logits_of(reference.float()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_family_says_its_settings_both_ways(case, tmp_path):
    save(CASES[case].build(), CASES[case], tmp_path)
    config = read_config(tmp_path)
    family = family_of_config(config)
    model = family.model_from_config(config)
    assert functional_settings(
        family.model_from_config(family.config_from_model(model))
    ) == functional_settings(model)
    assert family_of_model(model).supports(model)


def test_every_family_has_a_case(tmp_path):
    seen = set()
    for name, case in CASES.items():
        save(case.build(), case, tmp_path / name)
        seen.add(read_config(tmp_path / name)["model_type"])
    assert {family.model_type for family in FAMILIES} == seen


def quiet(done: int, count: int) -> None:
    """Show nothing."""


def randomised(reference: torch.nn.Module) -> torch.nn.Module:
    """With weights large enough that every part of the model shows in its output."""
    generator = torch.Generator().manual_seed(0)
    for parameter in reference.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = float(parameter.ndim == 1) + 0.2 * noise
    for name, buffer in reference.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return reference.eval()


def save(reference: torch.nn.Module, case: Case, directory: Path) -> None:
    if isinstance(reference, transformers.PreTrainedModel):
        reference.save_pretrained(directory, max_shard_size="100KB")
    else:
        directory.mkdir(exist_ok=True)
        save_file(reference.state_dict(), directory / "model.safetensors")
        (directory / "config.json").write_text("{}")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | case.config))
    (directory / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')


def load(directory: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory / "back", attn_implementation="eager"
    )


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def stacked(converted: ConvertedFolder) -> Any:
    """The decoder's parameters, with layers in front."""
    arrays = {}
    for path in flatten(parameter_specs(converted.model)):
        layers = range(converted.model.layers) if path.startswith("layers/") else [None]
        read = [converted.read([path], layer)[0] for layer in layers]
        arrays[path] = read[0] if layers == [None] else np.stack(read)
    return unflatten(arrays)


def logits_of(reference: torch.nn.Module) -> torch.Tensor:
    tokens = torch.tensor(TOKENS)
    if isinstance(reference, transformers.PreTrainedModel):
        return reference(tokens, use_cache=False).logits
    return reference(tokens)


def reference_gradients(
    reference: torch.nn.Module, config: dict[str, Any]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits, and gradients under the decoder's names: they move as the weights do."""
    loads = loads_of_experts(reference)
    want = logits_of(reference)
    torch.nn.functional.cross_entropy(want.flatten(0, 1), torch.tensor(TARGETS).ravel()).backward()
    family = family_of_config(config)
    model = family.model_from_config(config)
    by_name = checkpoint_names(reference) | loads
    found: dict[str, list[np.ndarray]] = {}
    for piece in family.weights(model):
        arrays = to_decoder(piece, [by_name[name] for name in piece.names], model)
        for path, array in zip(piece.row.paths, arrays, strict=True):
            found.setdefault(path, []).append(array)
    layered = {path for path in found if path.startswith("layers/")}
    return want.detach().numpy(), {
        path: np.stack(arrays) if path in layered else arrays[0] for path, arrays in found.items()
    }


def loads_of_experts(reference: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return the number of choices of each expert, by the name of its bias, once it is called.

    They are the gradients of the biases, which the step updates by them.
    """
    loads = {}

    def count(name: str, module: torch.nn.Module, output: Any) -> None:
        experts = len(module.e_score_correction_bias)
        loads[name] = np.bincount(output[2].numpy().ravel(), minlength=experts)

    for name, module in reference.named_modules():
        if hasattr(module, "e_score_correction_bias"):
            bias = f"{name}.e_score_correction_bias"
            module.register_forward_hook(
                lambda module, _, output, bias=bias: count(bias, module, output)
            )
    return loads


def checkpoint_names(reference: torch.nn.Module) -> dict[str, np.ndarray]:
    """Gradients by the names of a checkpoint: transformers keeps experts in one array each."""
    found = {}
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad.numpy()
        stacked = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        if not stacked or isinstance(reference, transformers.GptOssForCausalLM):
            found[name] = gradient
            continue
        mixtral = "Mixtral" in type(reference).__name__
        block, _, kind = name.rpartition(".experts.")
        block = block.replace(".mlp", ".block_sparse_moe") if mixtral else block
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        for expert, array in enumerate(gradient):
            parts = [array] if kind == "down_proj" else np.split(array, 2)
            for which, part in zip(
                names[2:] if kind == "down_proj" else names, parts, strict=False
            ):
                found[f"{block}.experts.{expert}.{which}.weight"] = part
        if mixtral:
            gate = f"{block}.gate.weight".replace(".block_sparse_moe", ".mlp")
            found[f"{block}.gate.weight"] = dict(reference.named_parameters())[gate].grad.numpy()
    return found


@jax.jit(static_argnums=0)
def scores_and_gradients(model: Model, parameters: Any, tokens: Any, targets: Any) -> Any:
    def loss(parameters: Any) -> tuple[jax.Array, jax.Array]:
        scores, _ = forward(model, parameters, tokens)
        log_shares = jax.nn.log_softmax(scores)
        return -jnp.take_along_axis(log_shares, targets[..., None], axis=-1).mean(), scores

    gradients, scores = jax.grad(loss, has_aux=True)(parameters)
    return scores, gradients


def assert_close(got: Any, want: np.ndarray, where: str) -> None:
    """To 1e-5 of the largest entry; key biases have no gradient, hence an absolute part."""
    assert got.shape == want.shape, where
    error = np.abs(np.asarray(got, np.float64) - want).max()
    assert error < 1e-5 * np.abs(want).max() + 1e-7, where


def assert_same_files(source: Path, back: Path) -> None:
    before, after = tensors(source), tensors(back)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name
    for name in ("config.json", "tokenizer.json"):
        assert (source / name).read_text() == (back / name).read_text()
