"""InternLM (Llama with attention biases) and InternLM2 (packed query, key and value)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from einops import rearrange

from graphtrain.config.schema import Model
from graphtrain.weights.families.family import Family, Row
from graphtrain.weights.families.llama import GROUPED, HEAD, NARROW, OUTPUT, ROWS, SIZES, WIDEN
from graphtrain.weights.families.settings import Choice, Only, Rope

_QKV = ("layers/attention/query", "layers/attention/key", "layers/attention/value")
_LAYER = "model.layers.{layer}"


def _divide(slots: np.ndarray, model: Model) -> list[np.ndarray]:
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
    (*SIZES, *HEAD, Rope(), Choice("bias", "bias", {False: "none", True: "attention"}, True)),
    ROWS,
)
INTERNLM2 = Family(
    "internlm2",
    "InternLM2ForCausalLM",
    (*SIZES, GROUPED[0], *HEAD, Rope(), Only("bias", False)),
    (
        Row("model.tok_embeddings.weight", ("embedding/tokens",)),
        Row("model.norm.weight", ("final_norm/scale",)),
        Row("output.weight", ("head",), "vocab embed -> embed vocab"),
        Row(f"{_LAYER}.attention_norm.weight", ("layers/attention_norm/scale",)),
        Row(f"{_LAYER}.ffn_norm.weight", ("layers/mlp_norm/scale",)),
        Row(
            f"{_LAYER}.attention.wqkv.weight",
            _QKV,
            "(kv_heads slots head_dim) embed -> slots embed kv_heads head_dim",
            _divide,
            _join,
        ),
        Row(f"{_LAYER}.attention.wo.weight", ("layers/attention/output",), OUTPUT),
        Row(f"{_LAYER}.feed_forward.w1.weight", ("layers/mlp/gate",), WIDEN),
        Row(f"{_LAYER}.feed_forward.w3.weight", ("layers/mlp/up",), WIDEN),
        Row(f"{_LAYER}.feed_forward.w2.weight", ("layers/mlp/down",), NARROW),
    ),
)
