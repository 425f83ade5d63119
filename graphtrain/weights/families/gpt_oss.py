"""gpt-oss: attention sinks, alternating sliding windows, and experts with biases.

OpenAI publishes the experts in MXFP4; their tensors are those here after dequantization.
"""

from __future__ import annotations

from graphtrain.weights.families.family import Family, WeightMapping
from graphtrain.weights.families.llama import (
    ATTENTION,
    EMBEDDING_AND_HEAD_ROWS,
    GROUPED_QUERY_SETTINGS,
    NORMS,
    SIZES,
    TIED_HEAD_SETTING,
)
from graphtrain.weights.families.mixtral import Experts
from graphtrain.weights.families.settings import (
    AlternatingSlidingWindow,
    EnumSetting,
    FixedEntry,
    RenamedSetting,
    Rope,
)

_LAYER = "model.layers.{layer}"
_EXPERTS, _ROUTER = f"{_LAYER}.mlp.experts", f"{_LAYER}.mlp.router"
_OTHERS = {
    "activation": EnumSetting("activation", "hidden_act", {"silu": "swiglu_clamped"}, "silu"),
    "norm_epsilon": RenamedSetting("norm_epsilon", "rms_norm_eps", 1e-5),
}

GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    (
        *(_OTHERS.get(setting.setting, setting) for setting in SIZES),
        *GROUPED_QUERY_SETTINGS,
        *TIED_HEAD_SETTING,
        Rope(150_000.0),
        AlternatingSlidingWindow(128, every=2),
        EnumSetting("bias", "attention_bias", {False: "none", True: "attention"}, True),
        Experts(("num_local_experts",), bias=True),
        FixedEntry("swiglu_alpha", 1.702),
        FixedEntry("swiglu_limit", 7.0),
    ),
    (
        *EMBEDDING_AND_HEAD_ROWS,
        *NORMS,
        *ATTENTION,
        WeightMapping(f"{_LAYER}.self_attn.sinks", ("layers/attention/sinks",)),
        WeightMapping(f"{_ROUTER}.weight", ("layers/mlp/router",), "router embed -> embed router"),
        WeightMapping(f"{_ROUTER}.bias", ("layers/mlp/router_bias",)),
        WeightMapping(
            f"{_EXPERTS}.gate_up_proj",
            ("layers/mlp/gate", "layers/mlp/up"),
            "experts embed (mlp two) -> two experts embed mlp",
        ),
        WeightMapping(
            f"{_EXPERTS}.gate_up_proj_bias",
            ("layers/mlp/gate_bias", "layers/mlp/up_bias"),
            "experts (mlp two) -> two experts mlp",
        ),
        WeightMapping(f"{_EXPERTS}.down_proj", ("layers/mlp/down",)),
        WeightMapping(f"{_EXPERTS}.down_proj_bias", ("layers/mlp/down_bias",)),
    ),
    fixed_settings={"attention_sinks": True},
)
