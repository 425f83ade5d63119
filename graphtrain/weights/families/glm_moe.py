"""GLM-4.5: rotary positions of half of each head, sigmoid routing and a shared expert."""

from graphtrain.weights.families.balanced_experts import (
    AHEAD,
    IGNORED,
    MLPS,
    BalancedExperts,
)
from graphtrain.weights.families.family import Family, ahead_rows, with_dense_layers
from graphtrain.weights.families.llama import (
    ATTENTION,
    EMBEDDING_AND_HEAD_ROWS,
    GROUPED_QUERY_SETTINGS,
    NORMS,
    SIZES,
    TIED_HEAD_SETTING,
)
from graphtrain.weights.families.settings import EnumSetting, Rope

GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    (
        *(setting for setting in SIZES if setting.setting not in ("layers", "mlp")),
        *GROUPED_QUERY_SETTINGS,
        *TIED_HEAD_SETTING,
        Rope(partial=0.5),
        EnumSetting("bias", "attention_bias", {False: "none", True: "qkv"}, False),
        EnumSetting("qk_norm", "use_qk_norm", {False: False, True: True}, False),
        BalancedExperts(),
    ),
    (
        *EMBEDDING_AND_HEAD_ROWS,
        *with_dense_layers((*NORMS, *ATTENTION)),
        *MLPS,
        *ahead_rows((*NORMS, *ATTENTION, *MLPS)),
        *AHEAD,
    ),
    ignored_tensors=IGNORED,
)
