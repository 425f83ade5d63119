"""InternLM (Llama with attention biases) and InternLM2 (packed query, key and value)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from einops import rearrange

from graphtrain.config.schema import Model
from graphtrain.weights.families.family import Family, WeightMapping
from graphtrain.weights.families.llama import (
    DOWN_PROJECTION,
    GROUPED_QUERY_SETTINGS,
    OUTPUT_PATTERN,
    ROWS,
    SIZES,
    TIED_HEAD_SETTING,
    UP_PROJECTION,
)
from graphtrain.weights.families.settings import EnumSetting, FixedEntry, Rope

_QKV = ("layers/attention/query", "layers/attention/key", "layers/attention/value")
_LAYER = "model.layers.{layer}"


def _split_qkv(slots: np.ndarray, model: Model) -> list[np.ndarray]:
    """Split the packed slots of each group into query heads, key and value."""
    query = rearrange(slots[:-2], "group embed kv_heads d -> embed (kv_heads group) d")
    return [query, slots[-2], slots[-1]]


def _join(arrays: Sequence[np.ndarray], model: Model) -> np.ndarray:
    query, key, value = arrays
    queries = rearrange(
        query, "embed (kv_heads group) d -> group embed kv_heads d", kv_heads=model.kv_heads
    )
    return np.concatenate([queries, key[None], value[None]])


INTERNLM = Family(
    "internlm",
    "InternLMForCausalLM",
    (
        *SIZES,
        *TIED_HEAD_SETTING,
        Rope(),
        EnumSetting("bias", "bias", {False: "none", True: "attention"}, True),
    ),
    ROWS,
)
INTERNLM2 = Family(
    "internlm2",
    "InternLM2ForCausalLM",
    (*SIZES, GROUPED_QUERY_SETTINGS[0], *TIED_HEAD_SETTING, Rope(), FixedEntry("bias", False)),
    (
        WeightMapping("model.tok_embeddings.weight", ("embedding/tokens",)),
        WeightMapping("model.norm.weight", ("final_norm/scale",)),
        WeightMapping("output.weight", ("head",), "vocab embed -> embed vocab"),
        WeightMapping(f"{_LAYER}.attention_norm.weight", ("layers/attention_norm/scale",)),
        WeightMapping(f"{_LAYER}.ffn_norm.weight", ("layers/mlp_norm/scale",)),
        WeightMapping(
            f"{_LAYER}.attention.wqkv.weight",
            _QKV,
            "(kv_heads slots head_dim) embed -> slots embed kv_heads head_dim",
            _split_qkv,
            _join,
        ),
        WeightMapping(
            f"{_LAYER}.attention.wo.weight", ("layers/attention/output",), OUTPUT_PATTERN
        ),
        WeightMapping(f"{_LAYER}.feed_forward.w1.weight", ("layers/mlp/gate",), UP_PROJECTION),
        WeightMapping(f"{_LAYER}.feed_forward.w3.weight", ("layers/mlp/up",), UP_PROJECTION),
        WeightMapping(f"{_LAYER}.feed_forward.w2.weight", ("layers/mlp/down",), DOWN_PROJECTION),
    ),
)
