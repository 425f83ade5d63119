"""Gemma 2 and 3: pre- and post-norms, alternating sliding windows, logit soft caps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphtrain.config.schema import Model
from graphtrain.weights.families.family import Config, Family, WeightMapping
from graphtrain.weights.families.llama import ATTENTION, EMBEDDING_AND_HEAD_ROWS, MLP
from graphtrain.weights.families.settings import (
    AlternatingSlidingWindow,
    EnumSetting,
    FixedEntry,
    RenamedSetting,
    Rope,
    read_partial_rotary_factor,
    read_rope_scaling,
    scaled_length,
    write_rope_scaling,
)

_LAYER, _TANH = "model.layers.{layer}", "gelu_pytorch_tanh"
_ROWS = (
    *EMBEDDING_AND_HEAD_ROWS,
    WeightMapping(f"{_LAYER}.input_layernorm.weight", ("layers/attention_norm/scale",)),
    WeightMapping(
        f"{_LAYER}.post_attention_layernorm.weight", ("layers/attention_post_norm/scale",)
    ),
    WeightMapping(f"{_LAYER}.pre_feedforward_layernorm.weight", ("layers/mlp_norm/scale",)),
    WeightMapping(f"{_LAYER}.post_feedforward_layernorm.weight", ("layers/mlp_post_norm/scale",)),
    *ATTENTION,
    *MLP,
)
_SETTINGS = (
    RenamedSetting("layers", "num_hidden_layers", 26),
    RenamedSetting("embed", "hidden_size", 2304),
    RenamedSetting("heads", "num_attention_heads", 8),
    RenamedSetting("kv_heads", "num_key_value_heads", 4),
    RenamedSetting("head_dim", "head_dim", 256),
    RenamedSetting("mlp", "intermediate_size", 9216),
    RenamedSetting("norm_epsilon", "rms_norm_eps", 1e-6),
    RenamedSetting("query_pre_attn_scalar", "query_pre_attn_scalar", 256),
    RenamedSetting("tie_word_embeddings", "tie_word_embeddings", True),
    EnumSetting("activation", "hidden_activation", {_TANH: "geglu_tanh"}, _TANH),
    EnumSetting("bias", "attention_bias", {False: "none", True: "attention"}, False),
    FixedEntry("use_bidirectional_attention", False),
)
_ALWAYS = {"rms_norm_offset": True, "post_norm": True, "scaled_embedding": True}


@dataclass(frozen=True)
class _TwoRopes:
    """Gemma 3's two RoPEs: one for sliding-window layers, and one, perhaps scaled, for the rest."""

    def read(self, config: Config) -> dict[str, Any]:
        if rope_parameters := config.get("rope_parameters"):
            full, sliding = rope_parameters["full_attention"], rope_parameters["sliding_attention"]
            base, sliding_base = full["rope_theta"], sliding["rope_theta"]
        else:
            full = config.get("rope_scaling") or {}
            base = config.get("rope_theta", 1e6)
            sliding_base = config.get("rope_local_base_freq", 1e4)
        for entries in (full, config.get("rope_parameters", {}).get("sliding_attention", {})):
            read_partial_rotary_factor(entries, config, None)
        return {
            "rope_theta": base,
            "rope_scaling": read_rope_scaling(full, config),
            "sliding_window_rope_theta": sliding_base,
        }

    def write(self, model: Model) -> dict[str, Any]:
        scaling = write_rope_scaling(model.rope_scaling)
        sliding_base = model.sliding_window_rope_theta or model.rope_theta
        return {
            "rope_theta": model.rope_theta,
            "rope_local_base_freq": sliding_base,
            "rope_scaling": scaling,
            "rope_parameters": {
                "full_attention": {
                    "rope_theta": model.rope_theta,
                    **(scaling or {"rope_type": "default"}),
                },
                "sliding_attention": {"rope_theta": sliding_base, "rope_type": "default"},
            },
            **scaled_length(model.rope_scaling),
        }


GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    (
        *_SETTINGS,
        RenamedSetting("vocab", "vocab_size", 256_000),
        RenamedSetting("attn_logit_softcap", "attn_logit_softcapping", None),
        RenamedSetting("final_logit_softcap", "final_logit_softcapping", None),
        Rope(),
        AlternatingSlidingWindow(4096, every=2),
    ),
    _ROWS,
    fixed_settings=_ALWAYS,
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    (
        *_SETTINGS,
        RenamedSetting("vocab", "vocab_size", 262_208),
        RenamedSetting("attn_logit_softcap", "attn_logit_softcapping", None),
        RenamedSetting("final_logit_softcap", "final_logit_softcapping", None),
        _TwoRopes(),
        AlternatingSlidingWindow(4096, every=6),
    ),
    _ROWS,
    fixed_settings=_ALWAYS | {"qk_norm": True},
)
