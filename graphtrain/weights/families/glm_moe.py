"""GLM-4.5: rotary positions of half of each head, sigmoid routing and a shared expert."""

from graphtrain.weights.families.balanced_experts import BALANCED_EXPERTS, BalancedExperts
from graphtrain.weights.families.family import Family
from graphtrain.weights.families.llama import (
    ATTENTION,
    EMBEDDING_AND_HEAD_ROWS,
    GROUPED_QUERY_SETTINGS,
    NORMS,
    SIZES,
    TIED_HEAD_SETTING,
)
from graphtrain.weights.families.settings import EnumSetting, FixedEntry, Rope

GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    (
        *(setting for setting in SIZES if setting.setting != "mlp"),
        *GROUPED_QUERY_SETTINGS,
        *TIED_HEAD_SETTING,
        Rope(partial=0.5),
        EnumSetting("bias", "attention_bias", {False: "none", True: "qkv"}, False),
        EnumSetting("qk_norm", "use_qk_norm", {False: False, True: True}, False),
        BalancedExperts(),
        FixedEntry("first_k_dense_replace", 0),
    ),
    (*EMBEDDING_AND_HEAD_ROWS, *NORMS, *ATTENTION, *BALANCED_EXPERTS),
)
