"""Conversion of the Megatron arguments stored in a checkpoint to settings of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphtrain.config.schema import MixtureOfExperts, Model, RopeScaling
from graphtrain.errors import WeightsError

Arguments = Mapping[str, Any]

# Values that the decoder supports, for arguments of which it supports only some.
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "activation_func_clamp_value": (None,),
    "apply_residual_connection_post_layernorm": (False,),
    "attention_output_gate": (False,),
    "embed_layernorm": (False,),
    "fp32_residual_connection": (False, True),
    "geglu": (False,),
    "glu_linear_offset": (0.0,),
    "heterogeneous_layers_config_path": ("",),
    "hybrid_layer_pattern": ("",),
    "hybrid_override_pattern": ("",),
    "moe_apply_probs_on_input": (False,),
    "moe_layer_freq": (1,),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_num_groups": (1,),
    "moe_router_score_function": ("softmax",),
    "moe_router_topk_limited_devices": (None,),
    "moe_router_topk_scaling_factor": (1.0,),
    "mtp_num_layers": (0,),
    "multi_latent_attention": (False,),
    "no_rope_freq": (0,),
    "post_norm": (False,),
    "qk_l2_norm": (False,),
    "quick_geglu": (False,),
    "rotary_interleaved": (False,),
    "rotary_percent": (1.0,),
    "softmax_scale": (None,),
    "softmax_type": ("vanilla",),
    "squared_relu": (False,),
    "window_attn_skip_freq": (0,),
}
_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "alibi": "alibi"}
_NORMS = {"LayerNorm": "layer", "RMSNorm": "rms"}


def model_from_arguments(arguments: Arguments, vocab: int) -> Model:
    """Return the model that Megatron's arguments describe.

    Args:
        arguments: Arguments of Megatron-LM by attribute name.
        vocab: Number of rows of the embedding.

    Raises:
        WeightsError: the decoder does not support an argument's value, or a size is missing.
    """
    for name, values in SUPPORTED_VALUES.items():
        if (value := arguments.get(name)) is not None and value not in values:
            allowed = " or ".join(map(repr, values))
            raise WeightsError(
                f"the checkpoint's args: {name} = {value!r} is not supported, only {allowed} is"
            )
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")
    if missing := [name for name in sizes if not arguments.get(name)]:
        raise WeightsError(
            f"the checkpoint's args do not contain {' and '.join(missing)}; "
            "specify the model: --model PRESET, or --model FILE.toml with a [program.model]"
        )
    try:
        return Model(
            layers=arguments["num_layers"],
            embed=arguments["hidden_size"],
            heads=arguments["num_attention_heads"],
            head_dim=arguments.get("kv_channels"),
            kv_heads=_groups(arguments),
            vocab=vocab,
            tie_word_embeddings=not arguments.get("untie_embeddings_and_output_weights", False),
            qk_norm=bool(arguments.get("qk_layernorm", False)),
            sliding_window=_window(arguments),
            **_mlp(arguments),
            **_norm(arguments),
            **_positions(arguments),
        )
    except (ValueError, TypeError) as error:  # also of arguments with values of other types
        raise WeightsError(
            f"the checkpoint's args do not describe a valid model: {error}"
        ) from error


def _groups(arguments: Arguments) -> int | None:
    return arguments.get("num_query_groups") if arguments.get("group_query_attention") else None


def _window(arguments: Arguments) -> int | None:
    """Return the sliding window; Megatron excludes the query's own position from its size."""
    if not (window := arguments.get("window_size")):
        return None
    return window[0] + 1 if isinstance(window, tuple | list) else window


def _mlp(arguments: Arguments) -> dict[str, Any]:
    settings: dict[str, Any] = {"mlp": arguments["ffn_hidden_size"], "bias": _bias(arguments)}
    if arguments.get("swiglu"):
        settings["activation"] = "swiglu"
    # Megatron's fused bias-GELU kernel always uses the tanh approximation.
    elif arguments.get("openai_gelu") or arguments.get("bias_gelu_fusion", True):
        settings["activation"] = "gelu_tanh"
    else:
        settings["activation"] = "gelu"
    if not arguments.get("num_experts"):
        return settings
    if "sinkhorn" in (balancing := arguments.get("moe_router_load_balancing_type") or ()):
        raise ValueError(f"moe_router_load_balancing_type = {balancing!r} is not supported")
    shared = arguments.get("moe_shared_expert_intermediate_size")
    settings["mlp"] = arguments.get("moe_ffn_hidden_size") or settings["mlp"]
    settings["moe"] = MixtureOfExperts(
        experts=arguments["num_experts"],
        experts_per_token=arguments.get("moe_router_topk") or 2,
        # A softmax over the chosen experts equals a normalised softmax over all experts.
        normalize_topk=not arguments.get("moe_router_pre_softmax", False),
        shared_expert_mlp=shared or None,
        shared_expert_gate=bool(arguments.get("moe_shared_expert_gate", False)) or not shared,
    )
    return settings


def _bias(arguments: Arguments) -> str:
    if arguments.get("add_bias_linear", not arguments.get("disable_bias_linear", False)):
        return "all"
    return "qkv" if arguments.get("add_qkv_bias") else "none"


def _norm(arguments: Arguments) -> dict[str, Any]:
    epsilon = arguments.get("norm_epsilon") or arguments.get("layernorm_epsilon") or 1e-5
    return {
        "norm": _translate(arguments, "normalization", "LayerNorm", _NORMS),
        "norm_epsilon": float(epsilon),
        "rms_norm_offset": bool(arguments.get("apply_layernorm_1p", False)),
    }


def _positions(arguments: Arguments) -> dict[str, Any]:
    rotary = arguments.get("use_rotary_position_embeddings", False)
    default = "rope" if rotary else "learned_absolute"
    kind = _translate(arguments, "position_embedding_type", default, _POSITIONS)
    if kind == "learned" and rotary:  # Megatron versions before position_embedding_type
        kind = "rope"
    if kind == "learned":
        return {
            "positions": kind,
            "max_position_embeddings": arguments.get("max_position_embeddings"),
        }
    if kind == "alibi":
        return {"positions": kind}
    base = float(arguments.get("rotary_base") or 10_000)
    return {"positions": kind, "rope_theta": base, "rope_scaling": _scaling(arguments)}


def _scaling(arguments: Arguments) -> RopeScaling | None:
    if arguments.get("use_rope_scaling"):
        # The other values are constants of megatron-core, RotaryEmbedding._apply_scaling.
        return RopeScaling(
            kind="llama3",
            factor=float(arguments.get("rope_scaling_factor") or 8.0),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        )
    factor = arguments.get("rotary_seq_len_interpolation_factor")
    return RopeScaling(kind="linear", factor=float(factor)) if factor else None


def _translate(arguments: Arguments, name: str, default: str, values: Mapping[str, str]) -> Any:
    value = arguments.get(name) or default
    if value not in values:
        supported = ", ".join(values)
        raise WeightsError(
            f"the checkpoint's args: {name} = {value!r} is not supported; supported: {supported}"
        )
    return values[value]
