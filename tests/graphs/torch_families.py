"""Tiny models of transformers, by model_type, as a config.json has them."""

import json
from pathlib import Path
from typing import Any

from graphtrain.config.schema import TorchModel

_LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
_PLAIN = {name: value for name, value in _LLAMA.items() if name != "num_key_value_heads"}
_HEADS = _LLAMA | {"head_dim": 8}
_GPT2 = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
_GEMMA = _HEADS | {"query_pre_attn_scalar": 8, "sliding_window": 4, "num_hidden_layers": 4}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"sliding_window": 4},
    "qwen2": _LLAMA,
    "qwen3": _HEADS,
    "gemma": _HEADS,
    "gemma2": _GEMMA,
    "phi": _LLAMA,
    "olmo": _LLAMA,
    "gpt2": _GPT2,
    "gpt_neox": _PLAIN,
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "new_decoder_architecture": False,
        "multi_query": True,
    },
    "mixtral": _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
# Not in every run of the tests: they are like the ones above.
MORE: dict[str, dict[str, Any]] = {
    "phi3": _LLAMA | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "olmo2": _LLAMA,
    "gemma3_text": _GEMMA,
    "stablelm": _LLAMA,
    "cohere": _LLAMA,
    "granite": _LLAMA,
    "starcoder2": _LLAMA,
    "gptj": _GPT2 | {"rotary_dim": 4},
    "gpt_neo": {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "max_position_embeddings": 32,
        "window_size": 4,
    },
    "opt": _PLAIN
    | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0},
    "qwen2_moe": _LLAMA
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "qwen3_moe": _HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "olmoe": _LLAMA | {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": _HEADS
    | {
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": _PLAIN
    | {
        "num_hidden_layers": 6,
        "first_k_dense_replace": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
}


def imported(folder: Path, kind: str, **settings: Any) -> TorchModel:
    """A tiny model of a family, computed in float32."""
    config = {"model_type": kind} | (FAMILIES | MORE)[kind]
    path = folder / f"{kind}.json"
    path.write_text(json.dumps(config))
    return TorchModel(**{"hf": str(path), "dtype": "float32", "remat": "none"} | settings)
