"""Table of Megatron's arrays, by the canonical names of `names.py`, and the decoder's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from einops import rearrange

from graphtrain.config.schema import Model
from graphtrain.models.flops import is_gated
from graphtrain.weights.families.family import Family, WeightMapping
from graphtrain.weights.families.llama import DOWN_PROJECTION, OUTPUT_PATTERN, UP_PROJECTION

_LAYER = "decoder.layers.{layer}"
_ATTENTION, _MLP = f"{_LAYER}.self_attention", f"{_LAYER}.mlp"
_QKV = ("layers/attention/query", "layers/attention/key", "layers/attention/value")


def _split_qkv(slots: np.ndarray, model: Model) -> list[np.ndarray]:
    """Split the packed slots of each group into query heads, key and value."""
    query = rearrange(slots[:-2], "group ... kv_heads d -> ... (kv_heads group) d")
    return [query, slots[-2], slots[-1]]


def _merge_qkv(arrays: Sequence[np.ndarray], model: Model) -> np.ndarray:
    """Pack query heads, keys and values into the slots of their groups; inverse of _split_qkv."""
    query, key, value = arrays
    groups = rearrange(
        query, "... (kv_heads group) d -> group ... kv_heads d", kv_heads=model.kv_heads
    )
    return np.concatenate([groups, key[None], value[None]])


def _norm(name: str, path: str) -> tuple[WeightMapping, WeightMapping]:
    return WeightMapping(f"{name}.weight", (f"{path}/scale",)), WeightMapping(
        f"{name}.bias", (f"{path}/bias",)
    )


def _up_projection_rows(
    name: str, paths: Sequence[str], experts: str = ""
) -> tuple[WeightMapping, WeightMapping]:
    """Return the rows of an MLP's first linear layer, which packs gate and up if gated."""
    bias = WeightMapping(f"{name}.bias", tuple(f"{path}_bias" for path in paths))
    if len(paths) == 1:
        pattern = f"{experts}mlp embed -> {experts}embed mlp" if experts else UP_PROJECTION
        return WeightMapping(f"{name}.weight", tuple(paths), pattern), bias
    pattern = f"{experts}(two mlp) embed -> two {experts}embed mlp"
    bias = WeightMapping(bias.name, bias.paths, "(two mlp) -> two mlp")
    return WeightMapping(f"{name}.weight", tuple(paths), pattern), bias


def megatron_family(model: Model) -> Family:
    """Return the table for a model, which depends on whether its MLP is gated and has experts."""
    names = ("gate", "up") if is_gated(model) else ("up",)
    up_paths = [f"layers/mlp/{name}" for name in names]
    if model.moe is None:
        mlp = (
            *_FUSED_ROWS,
            *_up_projection_rows(f"{_MLP}.linear_fc1", up_paths),
            WeightMapping(f"{_MLP}.linear_fc2.weight", ("layers/mlp/down",), DOWN_PROJECTION),
            WeightMapping(f"{_MLP}.linear_fc2.bias", ("layers/mlp/down_bias",)),
        )
    else:
        expert, shared = f"{_MLP}.experts.{{expert}}", f"{_MLP}.shared_experts"
        shared_paths = tuple(f"layers/mlp/shared_{name}" for name in names)
        shared_pattern = "(two m) e -> two e m" if len(names) == 2 else "m e -> e m"
        mlp = (
            WeightMapping(
                f"{_MLP}.router.weight", ("layers/mlp/router",), "router embed -> embed router"
            ),
            _up_projection_rows(f"{expert}.linear_fc1", up_paths, "experts ")[0],
            WeightMapping(
                f"{expert}.linear_fc2.weight",
                ("layers/mlp/down",),
                "experts embed mlp -> experts mlp embed",
            ),
            WeightMapping(f"{shared}.linear_fc1.weight", shared_paths, shared_pattern),
            WeightMapping(f"{shared}.linear_fc2.weight", ("layers/mlp/shared_down",), "e m -> m e"),
            WeightMapping(f"{shared}.gate_weight", ("layers/mlp/shared_share",), "1 e -> e"),
        )
    return Family("megatron", "GPTModel", (), (*_NON_LAYER_ROWS, *_ATTENTION_ROWS, *mlp))


_FUSED_ROWS = (  # of models with fused_gate_up
    WeightMapping(
        f"{_MLP}.linear_fc1.weight", ("layers/mlp/gate_up",), "(two mlp) embed -> embed two mlp"
    ),
    WeightMapping(f"{_MLP}.linear_fc1.bias", ("layers/mlp/gate_up_bias",), "(two mlp) -> two mlp"),
)
_NON_LAYER_ROWS = (
    WeightMapping("embedding.word_embeddings.weight", ("embedding/tokens",)),
    WeightMapping("embedding.position_embeddings.weight", ("embedding/positions",)),
    WeightMapping("output_layer.weight", ("head",), "vocab embed -> embed vocab"),
    *_norm("decoder.final_layernorm", "final_norm"),
)
_ATTENTION_ROWS = (
    *_norm(f"{_LAYER}.input_layernorm", "layers/attention_norm"),
    *_norm(f"{_LAYER}.pre_mlp_layernorm", "layers/mlp_norm"),
    *_norm(f"{_ATTENTION}.q_layernorm", "layers/attention/query_norm"),
    *_norm(f"{_ATTENTION}.k_layernorm", "layers/attention/key_norm"),
    WeightMapping(
        f"{_ATTENTION}.linear_qkv.weight",
        _QKV,
        "(kv_heads slots head_dim) embed -> slots embed kv_heads head_dim",
        _split_qkv,
        _merge_qkv,
    ),
    WeightMapping(
        f"{_ATTENTION}.linear_qkv.bias",
        tuple(f"{path}_bias" for path in _QKV),
        "(kv_heads slots head_dim) -> slots kv_heads head_dim",
        _split_qkv,
        _merge_qkv,
    ),
    WeightMapping(f"{_ATTENTION}.linear_proj.weight", ("layers/attention/output",), OUTPUT_PATTERN),
    WeightMapping(f"{_ATTENTION}.linear_proj.bias", ("layers/attention/output_bias",)),
)
