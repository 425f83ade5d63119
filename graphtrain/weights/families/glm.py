"""GLM-4: rotary positions of half of each head, in pairs of neighbours.

The models of 2024 are `glm`; those of 2025, `glm4`, normalize outputs of attention and MLP too.
"""

from __future__ import annotations

from dataclasses import replace

from graphtrain.weights.families.family import Family, WeightMapping
from graphtrain.weights.families.llama import (
    ATTENTION,
    DOWN_PROJECTION,
    EMBEDDING_AND_HEAD_ROWS,
    GROUPED_QUERY_SETTINGS,
    NORMS,
    SIZES,
    TIED_HEAD_SETTING,
)
from graphtrain.weights.families.rotary_pairs import to_halves, to_neighbours
from graphtrain.weights.families.settings import EnumSetting, Rope

_LAYER = "model.layers.{layer}"
_ROTATED = ("query", "key", "query_bias", "key_bias")
_ROWS = (
    *EMBEDDING_AND_HEAD_ROWS,
    *(
        replace(row, split=to_halves, merge=to_neighbours)
        if row.paths[0].removeprefix("layers/attention/") in _ROTATED
        else row
        for row in ATTENTION
    ),
    WeightMapping(
        f"{_LAYER}.mlp.gate_up_proj.weight",
        ("layers/mlp/gate", "layers/mlp/up"),
        "(two mlp) embed -> two embed mlp",
    ),
    WeightMapping(f"{_LAYER}.mlp.down_proj.weight", ("layers/mlp/down",), DOWN_PROJECTION),
)
_SETTINGS = (
    *SIZES,
    *GROUPED_QUERY_SETTINGS,
    *TIED_HEAD_SETTING,
    Rope(partial=0.5),
    EnumSetting("bias", "attention_bias", {False: "none", True: "qkv"}, True),
)
GLM = Family("glm", "GlmForCausalLM", _SETTINGS, (*_ROWS, *NORMS))
GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    _SETTINGS,
    (
        *_ROWS,
        *NORMS,
        WeightMapping(
            f"{_LAYER}.post_self_attn_layernorm.weight", ("layers/attention_post_norm/scale",)
        ),
        WeightMapping(f"{_LAYER}.post_mlp_layernorm.weight", ("layers/mlp_post_norm/scale",)),
    ),
    fixed_settings={"post_norm": True},
)
