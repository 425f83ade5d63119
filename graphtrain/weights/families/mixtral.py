"""Mixture-of-experts families: Mixtral, Qwen2-MoE (also Qwen1.5) and Qwen3-MoE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphtrain.config.schema import MixtureOfExperts, Model
from graphtrain.errors import WeightsError
from graphtrain.weights.families.family import Config, Family, WeightMapping
from graphtrain.weights.families.llama import (
    ATTENTION,
    EMBEDDING_AND_HEAD_ROWS,
    GROUPED_QUERY_SETTINGS,
    NORMS,
    SIZES,
    TIED_HEAD_SETTING,
)
from graphtrain.weights.families.settings import (
    EnumSetting,
    FixedEntry,
    QwenSlidingWindow,
    RenamedSetting,
    Rope,
    SlidingWindow,
)


@dataclass(frozen=True)
class Experts:
    """Number of experts, experts per token, normalisation of routing weights, shared expert."""

    count: tuple[str, ...]  # keys of the number of experts; the first one present is read
    normalise: str | None = None  # key; None: always normalised
    shared: str | None = None  # key of the shared expert's width; None: no shared expert
    bias: bool = False  # whether router and experts have biases

    def read(self, config: Config) -> dict[str, Any]:
        count = next((config[key] for key in self.count if key in config), None)
        if count is None or "num_experts_per_tok" not in config:
            raise WeightsError(f"config.json: {self.count[0]} or num_experts_per_tok is missing")
        normalise = bool(config.get(self.normalise)) if self.normalise else True
        per_token = config["num_experts_per_tok"]
        shared = config[self.shared] if self.shared else None
        return {
            "moe": MixtureOfExperts(
                experts=count,
                experts_per_token=per_token,
                normalize_topk=normalise,
                shared_expert_mlp=shared,
                expert_bias=self.bias,
            )
        }

    def write(self, model: Model) -> dict[str, Any]:
        if model.moe is None:
            raise WeightsError("the model has no experts: program.model.moe is not set")
        entries: dict[str, Any] = dict.fromkeys(self.count, model.moe.experts)
        entries["num_experts_per_tok"] = model.moe.experts_per_token
        if self.shared:
            entries[self.shared] = model.moe.shared_expert_mlp
        return entries | ({self.normalise: model.moe.normalize_topk} if self.normalise else {})


def expert_rows(block: str, gate: str, up: str, down: str) -> tuple[WeightMapping, ...]:
    """Return the rows of a router and its experts, with a family's tensor names."""
    widen, narrow = (
        "experts mlp embed -> experts embed mlp",
        "experts embed mlp -> experts mlp embed",
    )
    experts = f"{block}.experts.{{expert}}"
    return (
        WeightMapping(
            f"{block}.gate.weight", ("layers/mlp/router",), "router embed -> embed router"
        ),
        WeightMapping(f"{experts}.{gate}.weight", ("layers/mlp/gate",), widen),
        WeightMapping(f"{experts}.{up}.weight", ("layers/mlp/up",), widen),
        WeightMapping(f"{experts}.{down}.weight", ("layers/mlp/down",), narrow),
    )


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    (
        *SIZES,
        *GROUPED_QUERY_SETTINGS,
        *TIED_HEAD_SETTING,
        Rope(1e6),
        SlidingWindow(),
        Experts(("num_local_experts",)),
    ),
    (
        *EMBEDDING_AND_HEAD_ROWS,
        *NORMS,
        *ATTENTION,
        *expert_rows("model.layers.{layer}.block_sparse_moe", "w1", "w3", "w2"),
    ),
)
_WIDTH = (
    *(setting for setting in SIZES if getattr(setting, "setting", "") != "mlp"),
    RenamedSetting("mlp", "moe_intermediate_size"),
)
_EVERY_LAYER = (FixedEntry("decoder_sparse_step", 1), FixedEntry("mlp_only_layers", []))
_BLOCK = "model.layers.{layer}.mlp"
_ROWS = (
    *EMBEDDING_AND_HEAD_ROWS,
    *NORMS,
    *ATTENTION,
    *expert_rows(_BLOCK, "gate_proj", "up_proj", "down_proj"),
)
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    (
        *_WIDTH,
        GROUPED_QUERY_SETTINGS[0],
        *TIED_HEAD_SETTING,
        Rope(),
        QwenSlidingWindow(),
        Experts(("num_experts",), "norm_topk_prob", "shared_expert_intermediate_size"),
        *_EVERY_LAYER,
        FixedEntry("qkv_bias", True),
    ),
    (
        *_ROWS,
        WeightMapping(
            f"{_BLOCK}.shared_expert.gate_proj.weight", ("layers/mlp/shared_gate",), "m e -> e m"
        ),
        WeightMapping(
            f"{_BLOCK}.shared_expert.up_proj.weight", ("layers/mlp/shared_up",), "m e -> e m"
        ),
        WeightMapping(
            f"{_BLOCK}.shared_expert.down_proj.weight", ("layers/mlp/shared_down",), "e m -> m e"
        ),
        WeightMapping(
            f"{_BLOCK}.shared_expert_gate.weight", ("layers/mlp/shared_share",), "1 e -> e"
        ),
    ),
    fixed_settings={"bias": "qkv"},
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (
        *_WIDTH,
        *GROUPED_QUERY_SETTINGS,
        *TIED_HEAD_SETTING,
        Rope(),
        QwenSlidingWindow(),
        EnumSetting("bias", "attention_bias", {False: "none", True: "attention"}, False),
        Experts(("num_experts", "num_local_experts"), "norm_topk_prob"),
        *_EVERY_LAYER,
    ),
    _ROWS,
    fixed_settings={"qk_norm": True},
)
