"""Small configurations of every causal language model of transformers.

A family's own default configuration is made small by the names that sizes have; kinds of layers,
activations, norms and routers stay those of the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCAB = 96
_EMBED, _HEADS, _KV_HEADS, _HEAD_DIM, _MLP, _EXPERTS = 32, 4, 2, 8, 48, 4
_LAYERS = 4

# Sizes by the names that families give them; only those that a configuration has are set.
_SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("true_vocab_size", "unpadded_vocab_size"), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), _EMBED),
    **dict.fromkeys(("word_embed_proj_dim", "emb_dim", "dim_model", "lru_width"), _EMBED),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_key_value_shared_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), _HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), _KV_HEADS),
    **dict.fromkeys(("head_dim", "attention_head_size", "dim_head", "d_kv"), _HEAD_DIM),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), _MLP),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "dim_ff", "d_ff"), _MLP),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("shared_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), _EXPERTS),
    **dict.fromkeys(("moe_num_experts", "zero_expert_num"), _EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _HEAD_DIM),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), _HEAD_DIM),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length", "n_ctx"), 64),
    **dict.fromkeys(("max_seq_len", "context_length", "max_source_positions"), 64),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    "rotary_dim": 4,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
    "index_n_heads": 16,  # with few, scores that are 0 tie
    "index_head_dim": 8,
    "index_topk": 8,
    "hidden_size_per_layer_input": 8,
    "dim_model_base": _EMBED,
    "laurel_rank": 8,
}

_ENCODER_LAYERS = ("num_hidden_layers", "depth", "encoder_layers")

_WITHOUT_LAYER_INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}

_QWEN4_INDEXER = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}

# What the rules above do not give, by model_type.
_OWN: dict[str, Mapping[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    # As published; transformers' defaults have none.
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": _MLP, "moe_num_experts": _EXPERTS, "moe_top_k": 2},
    },
    "dots3_note": {
        "vision_config": {"adapter_out_dim": _EMBED, "num_hidden_layers": 42},
        "audio_config": {"adapter_out_dim": _EMBED},
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "zamba2": {"n_mamba_heads": 4, "mamba_headdim": 16},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    # Products and sums that transformers requires of the defaults' length and sizes.
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [3, 4],
        "axial_pos_embds_dim": [16, 16],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    # With the 512 of a published head, softmaxes of unscaled scores are those of one key.
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gemma4_assistant": {"text_config": _WITHOUT_LAYER_INPUTS},
    # Transformers' defaults have no layers, key heads, indexer or language, and fail.
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "nemotron": {"num_key_value_heads": _KV_HEADS},
    "qwen4_exp": {"text_config": _QWEN4_INDEXER},
    "qwen4_exp_text": _QWEN4_INDEXER,
    # Sizes whose names other families do not have, or use for other things.
    "kimi_linear": {"linear_num_heads": 4, "linear_head_dim": 8},
    "phi4_multimodal": {
        "audio_config": {"num_blocks": 2, "hidden_size": 32, "intermediate_size": _MLP}
        | dict.fromkeys(("ext_pw_out_channel", "depthwise_separable_out_channel"), 32)
        | {"nemo_conv_channels": 32, "num_attention_heads": _HEADS},
        "vision_config": {"hidden_size": 32, "intermediate_size": _MLP, "image_size": 28}
        | {"crop_size": 28, "num_attention_heads": _HEADS},
    },
    "xmod": {"default_language": "en_XX"},
    # With noise, the router draws experts by PyTorch's random numbers.
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
}

# Settings without which a family has no default configuration.
_NEEDED: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text"} | _WITHOUT_LAYER_INPUTS},
}


def tiny_config(model_type: str) -> str:
    """Return the contents of the config.json of a family's small configuration."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type, **_NEEDED.get(model_type, {}))
    small = _small(default.to_dict(), dict(getattr(default, "attribute_map", {})))
    for name, value in _OWN.get(model_type, {}).items():
        is_part = isinstance(value, dict) and isinstance(small.get(name), dict)
        small[name] = small[name] | value if is_part else value
    return AutoConfig.for_model(model_type, **small).to_json_string(use_diff=False)


def _small(written: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that make a configuration small, and those inside it.

    Args:
        written: The default configuration, as in config.json.
        names: Names under which the configuration stores others.
    """
    small: dict[str, Any] = {}
    for name, size in _SIZES.items():
        stored = names.get(name, name)
        value = written.get(stored)
        if isinstance(value, int) and not isinstance(value, bool):
            small[stored] = size
        elif name == "num_experts_per_tok" and stored in written:
            small[stored] = size  # DeepSeek-V2 has no default
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if written.get(name) is not None:
            small[name] = 1
    for name in ("layer_types", "layers_block_type", "block_types", "mlp_layer_types"):
        if isinstance(kinds := written.get(name), list):
            small[name] = _few(kinds)
    if written.get("is_decoder") is False:
        small["is_decoder"] = True  # else each token sees later ones
    # PyTorch's random numbers are not JAX's.
    small |= {name: 0.0 for name, rate in written.items() if "drop" in name and _is_rate(rate)}
    if "kv_lora_rank" in small and "num_key_value_heads" in small:
        small["num_key_value_heads"] = _HEADS  # latent attention expands keys to all heads
    for name, inner in written.items():
        if name.endswith("_config") and isinstance(inner, dict) and "model_type" in inner:
            small[name] = {"model_type": inner["model_type"]} | _small_part(name, inner)
    return small


def _small_part(name: str, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a part of a model: its text, or an encoder, which has few layers."""
    if name == "text_config":
        return _small(written, {}) | _OWN.get(written["model_type"], {})
    return {layers: 2 for layers in _ENCODER_LAYERS if isinstance(written.get(layers), int)}


def _is_rate(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < 1


def _few(kinds: list[str]) -> list[str]:
    """Return the kinds of few layers in which every kind occurs."""
    different = list(dict.fromkeys(kinds))
    return (different * _LAYERS)[:_LAYERS]
