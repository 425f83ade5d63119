"""Megatron-LM's arguments for a model, as a checkpoint stores them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from graphtrain.config.schema import Model
from graphtrain.errors import WeightsError
from graphtrain.models.flops import is_gated
from graphtrain.weights.families import functional_settings
from graphtrain.weights.megatron.arguments import model_from_arguments
from graphtrain.weights.megatron.layout import RankLayout

_POSITIONS = {"learned": "learned_absolute", "rope": "rope", "alibi": "alibi"}
_NORMS = {"layer": "LayerNorm", "rms": "RMSNorm"}


def arguments_of_model(model: Model, padded_vocab: int, layout: RankLayout) -> dict[str, Any]:
    """Return the arguments from which Megatron-LM makes a model with the same function.

    Args:
        model: Settings without rows that pad the vocabulary.
        padded_vocab: Rows of the embedding that is written.
        layout: Ranks for which the checkpoint is written.

    Raises:
        WeightsError: Megatron-LM, or graphtrain's reader of it, has no model with these settings.
    """
    arguments = {
        "num_layers": model.layers,
        "hidden_size": model.embed,
        "num_attention_heads": model.heads,
        "group_query_attention": model.kv_heads != model.heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.mlp,
        "vocab_size": model.vocab,
        "padded_vocab_size": padded_vocab,
        "untie_embeddings_and_output_weights": not model.tie_word_embeddings,
        "qk_layernorm": model.qk_norm,
        "normalization": _NORMS[model.norm],
        "norm_epsilon": model.norm_epsilon,
        "apply_layernorm_1p": model.rms_norm_offset,
        "add_bias_linear": model.bias == "all",
        "add_qkv_bias": model.bias in ("qkv", "all"),
        "swiglu": is_gated(model),
        "bias_gelu_fusion": model.activation == "gelu_tanh",
        "window_size": (model.sliding_window - 1, 0) if model.sliding_window else None,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "expert_model_parallel_size": layout.expert,
        "pipeline_model_parallel_layout": layout.pipeline_layout(model),
        **_positions(model),
        **_experts(model),
    }
    if layout.virtual > 1:
        arguments["virtual_pipeline_model_parallel_size"] = layout.virtual
    _check(model, arguments)
    return arguments


def _positions(model: Model) -> dict[str, Any]:
    arguments: dict[str, Any] = {"position_embedding_type": _POSITIONS[model.positions]}
    if model.positions == "learned":
        return arguments | {"max_position_embeddings": model.max_position_embeddings}
    if model.positions != "rope":
        return arguments
    base = model.rope_theta
    arguments |= {
        "rotary_base": int(base) if float(base).is_integer() else base,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
    }
    scaling = model.rope_scaling
    if scaling is not None and scaling.kind == "llama3":
        arguments |= {"use_rope_scaling": True, "rope_scaling_factor": scaling.factor}
    if scaling is not None and scaling.kind == "linear":
        arguments["rotary_seq_len_interpolation_factor"] = scaling.factor
    return arguments


def _experts(model: Model) -> dict[str, Any]:
    if (moe := model.moe) is None:
        return {}
    return {
        "num_experts": moe.experts,
        "moe_router_topk": moe.experts_per_token,
        "moe_ffn_hidden_size": model.mlp,
        "moe_router_pre_softmax": not moe.normalize_topk,
        "moe_router_score_function": "softmax",
        "moe_layer_freq": 1,
        "moe_grouped_gemm": False,
        "moe_shared_expert_intermediate_size": moe.shared_expert_mlp,
        "moe_shared_expert_gate": bool(moe.shared_expert_mlp and moe.shared_expert_gate),
    }


def _check(model: Model, arguments: dict[str, Any]) -> None:
    """Check that the arguments describe the model, by reading them again."""
    if model.activation == "gelu_tanh" and model.bias != "all":
        # Megatron-core computes it only in its fused kernel of bias and GELU.
        raise WeightsError(
            'Megatron-LM has program.model.activation = "gelu_tanh" only with bias = "all"'
        )
    if model.moe is not None and model.moe.experts_per_token == 1 and model.moe.normalize_topk:
        raise WeightsError(
            "Megatron-LM does not scale the gate weight of a single expert to 1; "
            "program.model.moe.experts_per_token = 1 needs normalize_topk = false"
        )
    wanted = functional_settings(replace(model, fused_gate_up=False))
    found = functional_settings(model_from_arguments(arguments, model.vocab))
    different = [
        f"program.model.{field.name} = {getattr(wanted, field.name)}"
        for field in fields(Model)
        if getattr(wanted, field.name) != getattr(found, field.name)
    ]
    if different:
        raise WeightsError(
            f"Megatron-LM checkpoints cannot describe {', '.join(different)}; train without these "
            "settings, or export to Hugging Face (graphtrain convert graphtrain-to-hf)"
        )
