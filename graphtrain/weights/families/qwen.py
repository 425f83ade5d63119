"""Qwen1.5 and Qwen2 (biases of query, key and value); Qwen3 (norms of query and key)."""

from graphtrain.weights.families.family import Family
from graphtrain.weights.families.llama import GROUPED, HEAD, ROWS, SIZES
from graphtrain.weights.families.settings import Choice, Key, QwenWindow, Rope

QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    (*SIZES, Key("kv_heads", "num_key_value_heads", None), *HEAD, Rope(), QwenWindow()),
    ROWS,
    always={"bias": "qkv"},
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    (
        *SIZES,
        *GROUPED,
        *HEAD,
        Rope(),
        QwenWindow(),
        Choice("bias", "attention_bias", {False: "none", True: "attention"}, False),
    ),
    ROWS,
    always={"query_key_norm": True},
)
