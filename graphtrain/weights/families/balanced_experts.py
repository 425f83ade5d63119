"""Layers of DeepSeek-V3 and GLM-4.5: first dense ones, then mixtures with a shared expert.

Experts are routed by sigmoid and balanced by a bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphtrain.config.schema import MixtureOfExperts, Model
from graphtrain.errors import WeightsError
from graphtrain.weights.families.family import Config, WeightMapping
from graphtrain.weights.families.mixtral import expert_rows

# Of DeepSeek-V3's training, the second towards its end; config.json has neither.
_UPDATE_RATE, _AHEAD_LOSS_WEIGHT = 0.001, 0.1
_BLOCK = "model.layers.{layer}.mlp"
_DENSE_BLOCK = "model.layers.{dense}.mlp"
_SHARED = f"{_BLOCK}.shared_experts"
_WIDEN, _NARROW = "dense_layers m e -> dense_layers e m", "dense_layers e m -> dense_layers m e"


@dataclass(frozen=True)
class BalancedExperts:
    """Number of layers, dense ones and others; experts, their routing, and the shared expert."""

    def read(self, config: Config) -> dict[str, Any]:
        width, groups = config["moe_intermediate_size"], config.get("n_group") or 1
        shared = config.get("n_shared_experts") or 0
        layers, dense = config["num_hidden_layers"], config["first_k_dense_replace"]
        if dense >= layers:
            raise WeightsError(
                f"config.json: first_k_dense_replace = {dense} leaves none of num_hidden_layers = "
                f"{layers} for a mixture of experts"
            )
        mixture = MixtureOfExperts(
            experts=config["n_routed_experts"],
            experts_per_token=config["num_experts_per_tok"],
            normalize_topk=bool(config.get("norm_topk_prob", True)),
            dense_layers=dense,
            dense_mlp=config["intermediate_size"] if dense else None,
            score_function="sigmoid",
            bias_update_rate=_UPDATE_RATE,
            groups=groups if groups > 1 else None,
            groups_per_token=config["topk_group"] if groups > 1 else None,
            routed_scaling_factor=config.get("routed_scaling_factor", 1.0),
            shared_expert_mlp=shared * width or None,
            shared_expert_gate=False,
            balance_loss=0.0,
            router_z_loss=0.0,
        )
        modules = config.get("num_nextn_predict_layers") or 0
        if modules > 1:
            raise WeightsError(
                f"config.json: num_nextn_predict_layers = {modules} is not supported, at most 1 is"
            )
        weight = _AHEAD_LOSS_WEIGHT if modules else None
        settings = {"mlp": width, "moe": mixture, "mtp_loss_weight": weight}
        return {"layers": layers - dense} | settings

    def write(self, model: Model) -> dict[str, Any]:
        mixture = model.moe
        if mixture is None:
            raise WeightsError("the model has no experts: program.model.moe is not set")
        shared, rest = divmod(mixture.shared_expert_mlp or 0, model.mlp)
        if rest:
            raise WeightsError(
                f"model.moe.shared_expert_mlp = {mixture.shared_expert_mlp} is not a multiple of "
                f"model.mlp = {model.mlp}"
            )
        return {
            "num_hidden_layers": model.depth,
            "num_nextn_predict_layers": model.ahead_layers,
            "first_k_dense_replace": model.dense_layers,
            "intermediate_size": mixture.dense_mlp or model.mlp,
            "moe_intermediate_size": model.mlp,
            "n_routed_experts": mixture.experts,
            "num_experts_per_tok": mixture.experts_per_token,
            "norm_topk_prob": mixture.normalize_topk,
            "n_group": mixture.groups or 1,
            "topk_group": mixture.groups_per_token or 1,
            "routed_scaling_factor": mixture.routed_scaling_factor,
            "n_shared_experts": shared,
        }


MLPS = (
    WeightMapping(f"{_DENSE_BLOCK}.gate_proj.weight", ("dense_layers/mlp/gate",), _WIDEN),
    WeightMapping(f"{_DENSE_BLOCK}.up_proj.weight", ("dense_layers/mlp/up",), _WIDEN),
    WeightMapping(f"{_DENSE_BLOCK}.down_proj.weight", ("dense_layers/mlp/down",), _NARROW),
    *expert_rows(_BLOCK, "gate_proj", "up_proj", "down_proj"),
    WeightMapping(f"{_BLOCK}.gate.e_score_correction_bias", ("layers/mlp/selection_bias",)),
    WeightMapping(f"{_SHARED}.gate_proj.weight", ("layers/mlp/shared_gate",), "m e -> e m"),
    WeightMapping(f"{_SHARED}.up_proj.weight", ("layers/mlp/shared_up",), "m e -> e m"),
    WeightMapping(f"{_SHARED}.down_proj.weight", ("layers/mlp/shared_down",), "e m -> m e"),
)

_AHEAD = "model.layers.{ahead}"
AHEAD = (
    WeightMapping(f"{_AHEAD}.enorm.weight", ("ahead/embedding_norm/scale",)),
    WeightMapping(f"{_AHEAD}.hnorm.weight", ("ahead/hidden_norm/scale",)),
    WeightMapping(f"{_AHEAD}.eh_proj.weight", ("ahead/projection",), "m (two e) -> two e m"),
    WeightMapping(f"{_AHEAD}.shared_head.norm.weight", ("ahead/norm/scale",)),
)
# Besides buffers: copies of the embedding and the LM head, which the module shares.
IGNORED = (
    r".*\.rotary_emb\.inv_freq",
    r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight",
)
