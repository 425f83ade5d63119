"""Small models with random weights, and what their own code in PyTorch generates greedily."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import references
import torch
import transformers
from safetensors.torch import save_file

CONTEXT, VOCAB = 336, 256

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
}
ALL_HEADS = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = SIZES | WINDOWS | {"head_dim": 8, "query_pre_attn_scalar": 20}
GEMMA2 = GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
OWN = {"layers": 2, "embed": 48, "heads": 6, "kv_heads": 2, "mlp": 48, "vocab": VOCAB}
OWN_CONFIG = SIZES | {"hidden_size": 48, "num_attention_heads": 6, "rms_norm_eps": 1e-6}
BAICHUAN = {name: value for name, value in OWN_CONFIG.items() if name != "max_position_embeddings"}


@dataclass(frozen=True)
class Case:
    """A model of transformers by name and settings, or a module and its config.json."""

    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    module: Callable[[], torch.nn.Module] | None = None
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def has_windows(self) -> bool:
        return "sliding_window" in self.settings

    def save(self, directory: Path) -> torch.nn.Module:
        """Write the model with random weights to a folder, and return it."""
        if self.module is not None:
            model = _with_random_weights(self.module())
            directory.mkdir()
            save_file(model.state_dict(), directory / "model.safetensors")
            (directory / "config.json").write_text(json.dumps(self.config))
            return model
        config = getattr(transformers, f"{self.name}Config")(**self.settings)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        _with_random_weights(model).save_pretrained(directory)
        return model


NATIVE = {
    "llama 3": Case("Llama", SIZES | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "gpt2": Case(
        "GPT2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "vocab_size": VOCAB},
    ),
    "qwen2, windows": Case(
        "Qwen2", SIZES | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    ),
    "qwen3": Case("Qwen3", SIZES | {"head_dim": 16}),
    "gemma 2": Case("Gemma2", GEMMA2),
    "gemma 3": Case("Gemma3Text", GEMMA | {"rope_parameters": GEMMA3_ROPES}),
    "mistral": Case("Mistral", SIZES | {"sliding_window": 16}),
    "mixtral": Case("Mixtral", SIZES | {"num_experts_per_tok": 2, "num_local_experts": 4}),
    "gpt-oss": Case(
        "GptOss",
        SIZES | WINDOWS | {"head_dim": 8, "num_experts_per_tok": 2, "num_local_experts": 4},
    ),
    "deepseek v3": Case(
        "DeepseekV3",
        SIZES
        | {"num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": 28, "v_head_dim": 12}
        | {"qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "n_routed_experts": 8, "n_group": 4}
        | {"topk_group": 2, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
        | {"first_k_dense_replace": 1, "num_mtp_layers": 0},
    ),
    "bloom": Case("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB}),
    "baichuan2 13b": Case(
        module=lambda: references.baichuan(OWN | {"kv_heads": 6}, alibi=True, unit_head=True),
        config=BAICHUAN
        | {"num_key_value_heads": 6, "model_type": "baichuan", "z_loss_weight": 0}
        | {"model_max_length": CONTEXT},
    ),
    "internlm2": Case(
        module=lambda: references.internlm2(OWN),
        config=OWN_CONFIG | {"model_type": "internlm2", "bias": False},
    ),
}
IMPORTED = {
    "gpt_neox": Case("GPTNeoX", ALL_HEADS),
    "opt": Case(
        "OPT",
        ALL_HEADS | {"ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": True},
    ),
    "phi": Case("Phi", SIZES),
    "stablelm": Case("StableLm", SIZES),
    "mistral": Case("Mistral", SIZES | {"sliding_window": 16}),
    "gemma 2": Case("Gemma2", GEMMA2),
    "olmo2": Case("Olmo2", SIZES),
    "granite": Case("Granite", SIZES | {"attention_multiplier": 0.3, "logits_scaling": 2.0}),
    "cohere2": Case("Cohere2", SIZES | WINDOWS),
}


def _with_random_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Fill a model with weights so large that every part of it shows in its output.

    Those of embeddings are small, so that a head that shares them does not repeat the last token.
    """
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_embedding = "emb" in name or "wte" in name
        parameter.data = (0.05 if is_embedding else 0.2) * noise
        if parameter.ndim == 1 and "bias" not in name:  # scale of a norm
            parameter.data += 0.1 if is_embedding else 1.0
    return model.eval()


def log_probs(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities (seq, vocab) of the token after each one, without a KV cache."""
    batch = torch.tensor([tokens])
    with torch.no_grad():
        if isinstance(model, transformers.PreTrainedModel):
            return model(batch, use_cache=False).logits[0].log_softmax(-1)
        return model(batch)[0].log_softmax(-1)


def generate(model: torch.nn.Module, prompt: list[int], count: int) -> list[tuple[int, float]]:
    """Generate greedily by transformers; return each token with its log-probability.

    A model whose code is not in transformers is called on the whole text for each token.
    """
    if isinstance(model, transformers.PreTrainedModel):
        model.generation_config.eos_token_id = None
        settings = transformers.GenerationConfig(
            max_new_tokens=count, do_sample=False, pad_token_id=0, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        tokens = torch.tensor([prompt])
        made: Any = model.generate(tokens, settings, attention_mask=torch.ones_like(tokens))
        rows = torch.cat(made.logits).log_softmax(-1)
        assert rows.argmax(-1).tolist() == made.sequences[0, len(prompt) :].tolist()
    else:
        text, found = list(prompt), []
        for _ in range(count):
            found.append(log_probs(model, text)[-1])
            text.append(int(found[-1].argmax()))
        rows = torch.stack(found)
    best = rows.topk(2)
    # Rounding does not decide which token it is.
    assert (best.values[:, 0] - best.values[:, 1]).min() > 2e-4
    return list(zip(best.indices[:, 0].tolist(), best.values[:, 0].tolist(), strict=True))
