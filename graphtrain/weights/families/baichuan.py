"""Baichuan 1 and 2: 7B with RoPE, 13B with ALiBi; Baichuan 2 normalises the rows of the LM head.

All share one model_type. Only the config.json of 7B contains max_position_embeddings, and only that
of Baichuan 2 contains z_loss_weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphtrain.config.schema import Model
from graphtrain.weights.families.family import Config, Family, WeightMapping
from graphtrain.weights.families.llama import (
    EMBEDDING_AND_HEAD_ROWS,
    MLP,
    NORMS,
    OUTPUT_PATTERN,
    SIZES,
    TIED_HEAD_SETTING,
)

_QKV = ("layers/attention/query", "layers/attention/key", "layers/attention/value")


@dataclass(frozen=True)
class _Generation:
    def read(self, config: Config) -> dict[str, Any]:
        return {
            "positions": "rope" if config.get("max_position_embeddings") else "alibi",
            "unit_norm_head": "z_loss_weight" in config,
        }

    def write(self, model: Model) -> dict[str, Any]:
        entries: dict[str, Any] = {"model_max_length": 4096}
        if model.positions == "rope":
            entries["max_position_embeddings"] = 4096
        return entries | ({"z_loss_weight": 0} if model.unit_norm_head else {})


BAICHUAN = Family(
    "baichuan",
    "BaichuanForCausalLM",
    (*SIZES, *TIED_HEAD_SETTING, _Generation()),
    (
        *EMBEDDING_AND_HEAD_ROWS,
        *NORMS,
        WeightMapping(
            "model.layers.{layer}.self_attn.W_pack.weight",
            _QKV,
            "(three heads head_dim) embed -> three embed heads head_dim",
        ),
        WeightMapping(
            "model.layers.{layer}.self_attn.o_proj.weight",
            ("layers/attention/output",),
            OUTPUT_PATTERN,
        ),
        *MLP,
    ),
    ignored_tensors=(r".*\.rotary_emb\.inv_freq", r"model\.(future_mask|alibi_mask)"),
)
