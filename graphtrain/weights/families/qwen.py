"""Qwen1.5 and Qwen2 (biases of query, key and value); Qwen3 (norms of query and key)."""

from graphtrain.weights.families.family import Family
from graphtrain.weights.families.llama import GROUPED_QUERY_SETTINGS, ROWS, SIZES, TIED_HEAD_SETTING
from graphtrain.weights.families.settings import (
    EnumSetting,
    QwenSlidingWindow,
    RenamedSetting,
    Rope,
)

QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    (
        *SIZES,
        RenamedSetting("kv_heads", "num_key_value_heads", None),
        *TIED_HEAD_SETTING,
        Rope(),
        QwenSlidingWindow(),
    ),
    ROWS,
    fixed_settings={"bias": "qkv"},
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    (
        *SIZES,
        *GROUPED_QUERY_SETTINGS,
        *TIED_HEAD_SETTING,
        Rope(),
        QwenSlidingWindow(),
        EnumSetting("bias", "attention_bias", {False: "none", True: "attention"}, False),
    ),
    ROWS,
    fixed_settings={"qk_norm": True},
)
