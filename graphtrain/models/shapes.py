"""Arrays of a training state, by arithmetic: equal to models.decoder.parameter_specs, untraced."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from graphtrain.config.schema import Model, Optimizer
from graphtrain.models.flops import LATENT_AXES, is_gated, latent_size, norm_has_bias
from graphtrain.models.optimizer_state import optimizer_arrays
from sharding_rules.arrays import ArraySpec

STACKS = ("dense_layers", "layers")  # parameters with a leading layer axis of this name


@cache
def parameter_arrays(model: Model) -> dict[str, ArraySpec]:
    """Return the ArraySpecs of all parameters by path, for example "layers/mlp/up"."""
    arrays = {
        "embedding/tokens": _array(model, "vocab", "embed"),
        **{f"final_norm/{name}": spec for name, spec in _norm(model).items()},
    }
    if model.embedding_norm:
        arrays |= {f"embedding/norm/{name}": spec for name, spec in _norm(model).items()}
    if model.positions == "learned":
        arrays["embedding/positions"] = _array(model, "positions", "embed")
    if not model.tie_word_embeddings:
        arrays["head"] = _array(model, "embed", "vocab")
    if model.dense_layers:
        arrays |= _stack(model, "dense_layers", model.dense_layers, _mlp(model, "dense_mlp"))
    if model.ahead_layers:
        arrays |= {f"ahead/{name}": spec for name, spec in _ahead(model).items()}
    return arrays | _stack(model, "layers", model.layers, _main_mlp(model))


def head_path(model: Model) -> str:
    """Return the path of the LM head, which may be the embedding."""
    return "embedding/tokens" if model.tie_word_embeddings else "head"


def _main_mlp(model: Model) -> dict[str, ArraySpec]:
    return _mlp(model) if model.moe is None else _experts(model)


def _ahead(model: Model) -> dict[str, ArraySpec]:
    arrays = {"projection": _array(model, None, "embed", "ahead")}
    for norm in ("embedding_norm", "hidden_norm", "norm"):
        arrays |= {f"{norm}/{name}": spec for name, spec in _norm(model).items()}
    block = _block(model, _main_mlp(model))
    return arrays | {f"block/{name}": spec for name, spec in block.items()}


def _stack(
    model: Model, stack: str, count: int, mlp: Mapping[str, ArraySpec]
) -> dict[str, ArraySpec]:
    """Return the ArraySpecs of `count` stacked blocks with an MLP of these arrays."""
    return {
        f"{stack}/{name}": replace(spec, shape=(count, *spec.shape), axes=(stack, *spec.axes))
        for name, spec in _block(model, mlp).items()
    }


def _block(model: Model, mlp: Mapping[str, ArraySpec]) -> dict[str, ArraySpec]:
    block = {f"attention/{name}": spec for name, spec in _attention(model).items()}
    block |= {f"mlp/{name}": spec for name, spec in mlp.items()}
    post = ("attention_post_norm", "mlp_post_norm") if model.post_norm else ()
    for norm in ("attention_norm", "mlp_norm", *post):
        block |= {f"{norm}/{name}": spec for name, spec in _norm(model).items()}
    return block


def state_arrays(parameters: Mapping[str, ArraySpec], optimizer: Optimizer) -> dict[str, ArraySpec]:
    """Return the ArraySpecs of trained weights and optimizer state, by path as in a plan."""
    arrays = {f"state/parameters/{path}": spec for path, spec in parameters.items()}
    state = optimizer_arrays(parameters, optimizer)
    return arrays | {f"state/optimizer/{path}": spec for path, spec in state.items()}


def _latent_attention(model: Model) -> dict[str, ArraySpec]:
    arrays = {
        "kv_down": _array(model, "embed", "kv_latent"),
        "key_rope": _array(model, "embed", "rope_head_dim"),
        "key_up": _array(model, "kv_lora", "heads", "nope_head_dim"),
        "value_up": _array(model, "kv_lora", "heads", "v_head_dim"),
        "output": _array(model, "heads", "v_head_dim", "embed"),
    }
    norms = {"kv_norm": "kv_latent"}
    assert model.latent_attention is not None
    if model.latent_attention.q_lora_rank is None:
        arrays["query"] = _array(model, "embed", "heads", "head_dim")
    else:
        arrays["query_down"] = _array(model, "embed", "q_latent")
        arrays["query_up"] = _array(model, "q_lora", "heads", "head_dim")
        norms["query_norm"] = "q_latent"
    if model.attention_sinks:
        arrays["sinks"] = _array(model, "heads")
    for norm, axis in norms.items():
        arrays |= {f"{norm}/{name}": spec for name, spec in _norm(model, axis).items()}
    return arrays


def _attention(model: Model) -> dict[str, ArraySpec]:
    if model.latent_attention is not None:
        return _latent_attention(model)
    arrays = {
        "query": _array(model, "embed", "heads", "head_dim"),
        "key": _array(model, "embed", "kv_heads", "head_dim"),
        "value": _array(model, "embed", "kv_heads", "head_dim"),
        "output": _array(model, "heads", "head_dim", "embed"),
    }
    if model.bias != "none":
        arrays["query_bias"] = _array(model, "heads", "head_dim")
        arrays["key_bias"] = _array(model, "kv_heads", "head_dim")
        arrays["value_bias"] = _array(model, "kv_heads", "head_dim")
    if model.bias in ("attention", "all"):
        arrays["output_bias"] = _array(model, "embed")
    if model.attention_sinks:
        arrays["sinks"] = _array(model, "heads")
    if model.qk_norm:
        for norm in ("query_norm", "key_norm"):
            norm_arrays = _norm(model, "head_dim")
            arrays |= {f"{norm}/{name}": spec for name, spec in norm_arrays.items()}
    return arrays


def _mlp(model: Model, width: str = "mlp") -> dict[str, ArraySpec]:
    names = ("gate", "up") if is_gated(model) else ("up",)
    output_axes: dict[str, tuple[str | None, ...]] = dict.fromkeys(names, (width,))
    if model.fused_gate_up:
        output_axes = {"gate_up": (None, "mlp")}
    arrays = {name: _array(model, "embed", *axes) for name, axes in output_axes.items()}
    arrays["down"] = _array(model, width, "embed")
    if model.bias == "all":
        arrays |= {f"{name}_bias": _array(model, *axes) for name, axes in output_axes.items()}
        arrays["down_bias"] = _array(model, "embed")
    return arrays


def _experts(model: Model) -> dict[str, ArraySpec]:
    names = ("gate", "up") if is_gated(model) else ("up",)
    assert model.moe is not None
    arrays = {
        "router": _array(model, "embed", "router"),
        **{name: _array(model, "experts", "embed", "mlp") for name in names},
        "down": _array(model, "experts", "mlp", "embed"),
    }
    if model.moe.bias_update_rate is not None:
        arrays["selection_bias"] = replace(_array(model, "router"), role="buffer")
    if model.moe.expert_bias:
        arrays |= {f"{name}_bias": _array(model, "experts", "mlp") for name in names}
        arrays["down_bias"] = _array(model, "experts", "embed")
        arrays["router_bias"] = _array(model, "router")
    if model.moe.shared_expert_mlp is not None:
        arrays |= {f"shared_{name}": _array(model, "embed", "shared") for name in names}
        arrays["shared_down"] = _array(model, "shared", "embed")
        if model.moe.shared_expert_gate:
            arrays["shared_share"] = _array(model, "embed")
    return arrays


def _norm(model: Model, axis: str = "embed") -> dict[str, ArraySpec]:
    names = ("scale", "bias") if norm_has_bias(model) else ("scale",)
    return {name: _array(model, axis) for name in names}


def _array(model: Model, *axes: str | None) -> ArraySpec:
    return ArraySpec(tuple(axis_size(model, axis) for axis in axes), axes)


def axis_size(model: Model, axis: str | None) -> int:
    """Return the size of an array axis: the setting of the same name, with a few exceptions.

    None is a pair, gate and up.
    """
    if axis is None:
        return 2
    if axis in ("experts", "router", "shared", "dense_mlp"):
        assert model.moe is not None
        widths = {"shared": model.moe.shared_expert_mlp, "dense_mlp": model.moe.dense_mlp}
        return widths.get(axis, model.moe.experts) or 0
    if axis in LATENT_AXES:
        return latent_size(model, axis)
    if axis == "ahead":
        return model.embed
    return getattr(model, "max_position_embeddings" if axis == "positions" else axis)
