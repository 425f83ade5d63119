"""Table of Megatron's arrays, by the canonical names of `names.py`, and the decoder's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from einops import rearrange

from graphtrain.config.schema import Model
from graphtrain.models.flops import is_gated
from graphtrain.weights.families.family import Family, Row
from graphtrain.weights.families.llama import NARROW, OUTPUT, WIDEN

_LAYER = "decoder.layers.{layer}"
_ATTENTION, _MLP = f"{_LAYER}.self_attention", f"{_LAYER}.mlp"
_QKV = ("layers/attention/query", "layers/attention/key", "layers/attention/value")


def _divide(slots: np.ndarray, model: Model) -> list[np.ndarray]:
    """Split the packed slots of each group into query heads, key and value."""
    query = rearrange(slots[:-2], "group ... kv_heads d -> ... (kv_heads group) d")
    return [query, slots[-2], slots[-1]]


def _norm(name: str, path: str) -> tuple[Row, Row]:
    return Row(f"{name}.weight", (f"{path}/scale",)), Row(f"{name}.bias", (f"{path}/bias",))


def _widen(name: str, paths: Sequence[str], experts: str = "") -> tuple[Row, Row]:
    """Return the rows of an MLP's first linear layer, which packs gate and up if gated."""
    bias = Row(f"{name}.bias", tuple(f"{path}_bias" for path in paths))
    if len(paths) == 1:
        pattern = f"{experts}mlp embed -> {experts}embed mlp" if experts else WIDEN
        return Row(f"{name}.weight", tuple(paths), pattern), bias
    pattern = f"{experts}(two mlp) embed -> two {experts}embed mlp"
    bias = Row(bias.name, bias.paths, "(two mlp) -> two mlp")
    return Row(f"{name}.weight", tuple(paths), pattern), bias


def megatron(model: Model) -> Family:
    """Return the table for a model, which depends on whether its MLP is gated and has experts."""
    names = ("gate", "up") if is_gated(model) else ("up",)
    widened = [f"layers/mlp/{name}" for name in names]
    if model.mixture is None:
        mlp = (
            *_widen(f"{_MLP}.linear_fc1", widened),
            Row(f"{_MLP}.linear_fc2.weight", ("layers/mlp/down",), NARROW),
            Row(f"{_MLP}.linear_fc2.bias", ("layers/mlp/down_bias",)),
        )
    else:
        one, shared = f"{_MLP}.experts.{{expert}}", f"{_MLP}.shared_experts"
        shared_paths = tuple(f"layers/mlp/shared_{name}" for name in names)
        both = "(two m) e -> two e m" if len(names) == 2 else "m e -> e m"
        mlp = (
            Row(f"{_MLP}.router.weight", ("layers/mlp/router",), "routes embed -> embed routes"),
            _widen(f"{one}.linear_fc1", widened, "experts ")[0],
            Row(
                f"{one}.linear_fc2.weight",
                ("layers/mlp/down",),
                "experts embed mlp -> experts mlp embed",
            ),
            Row(f"{shared}.linear_fc1.weight", shared_paths, both),
            Row(f"{shared}.linear_fc2.weight", ("layers/mlp/shared_down",), "e m -> m e"),
            Row(f"{shared}.gate_weight", ("layers/mlp/shared_share",), "1 e -> e"),
        )
    return Family("megatron", "GPTModel", (), (*_OUTSIDE, *_ATTENTION_ROWS, *mlp))


_OUTSIDE = (
    Row("embedding.word_embeddings.weight", ("embedding/tokens",)),
    Row("embedding.position_embeddings.weight", ("embedding/positions",)),
    Row("output_layer.weight", ("head",), "vocab embed -> embed vocab"),
    *_norm("decoder.final_layernorm", "final_norm"),
)
_ATTENTION_ROWS = (
    *_norm(f"{_LAYER}.input_layernorm", "layers/attention_norm"),
    *_norm(f"{_LAYER}.pre_mlp_layernorm", "layers/mlp_norm"),
    *_norm(f"{_ATTENTION}.q_layernorm", "layers/attention/query_norm"),
    *_norm(f"{_ATTENTION}.k_layernorm", "layers/attention/key_norm"),
    Row(
        f"{_ATTENTION}.linear_qkv.weight",
        _QKV,
        "(kv_heads slots head_dim) embed -> slots embed kv_heads head_dim",
        _divide,
    ),
    Row(
        f"{_ATTENTION}.linear_qkv.bias",
        tuple(f"{path}_bias" for path in _QKV),
        "(kv_heads slots head_dim) -> slots kv_heads head_dim",
        _divide,
    ),
    Row(f"{_ATTENTION}.linear_proj.weight", ("layers/attention/output",), OUTPUT),
    Row(f"{_ATTENTION}.linear_proj.bias", ("layers/attention/output_bias",)),
)
