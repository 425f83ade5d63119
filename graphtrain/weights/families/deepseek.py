"""DeepSeek-V3 and Kimi K2: multi-head latent attention, and mixtures after the first layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graphtrain.config.schema import LatentAttention, Model
from graphtrain.errors import WeightsError
from graphtrain.weights.families.balanced_experts import (
    AHEAD,
    IGNORED,
    MLPS,
    BalancedExperts,
)
from graphtrain.weights.families.family import (
    Config,
    Family,
    WeightMapping,
    ahead_rows,
    with_dense_layers,
)
from graphtrain.weights.families.llama import (
    EMBEDDING_AND_HEAD_ROWS,
    NORMS,
    QUERY_PATTERN,
    SIZES,
    TIED_HEAD_SETTING,
)
from graphtrain.weights.families.rotary_pairs import to_halves, to_neighbours
from graphtrain.weights.families.settings import FixedEntry, Rope

_LATENT_EPSILON = 1e-6  # of the norms of latents in transformers, whatever rms_norm_eps
_ATTENTION, _PATH = "model.layers.{layer}.self_attn", "layers/attention"


@dataclass(frozen=True)
class _LatentSizes:
    """Sizes of latents and heads."""

    def read(self, config: Config) -> dict[str, Any]:
        epsilon = config.get("rms_norm_eps", _LATENT_EPSILON)
        if epsilon != _LATENT_EPSILON:
            raise WeightsError(
                f"config.json: rms_norm_eps = {epsilon!r} is not supported, because norms of "
                f"latents have {_LATENT_EPSILON!r}; only that is"
            )
        rotated = config["qk_rope_head_dim"]
        latent = LatentAttention(
            kv_lora_rank=config["kv_lora_rank"],
            q_lora_rank=config.get("q_lora_rank"),
            qk_rope_head_dim=rotated,
            v_head_dim=config["v_head_dim"],
        )
        return {"head_dim": config["qk_nope_head_dim"] + rotated, "latent_attention": latent}

    def write(self, model: Model) -> dict[str, Any]:
        latent = model.latent_attention
        if latent is None or model.head_dim is None:
            raise WeightsError("the model has no latents: model.latent_attention is not set")
        return {
            "num_key_value_heads": model.heads,
            "kv_lora_rank": latent.kv_lora_rank,
            "q_lora_rank": latent.q_lora_rank,
            "qk_rope_head_dim": latent.qk_rope_head_dim,
            "qk_nope_head_dim": model.head_dim - latent.qk_rope_head_dim,
            "v_head_dim": latent.v_head_dim,
        }


def _to_rotated_first(array: np.ndarray, model: Model) -> list[np.ndarray]:
    """Order the last axis, a head: first the dimensions that are rotated, by halves."""
    return to_halves(np.roll(array, model.rotary_dim, axis=-1), model)


def _to_rotated_last(arrays: Sequence[np.ndarray], model: Model) -> np.ndarray:
    """Undo _to_rotated_first."""
    return np.roll(to_neighbours(arrays, model), -model.rotary_dim, axis=-1)


def _split_latent(array: np.ndarray, model: Model) -> list[np.ndarray]:
    """Split the last axis into the latent and the rotated key, which is ordered by halves."""
    assert model.latent_attention is not None
    rank = model.latent_attention.kv_lora_rank
    return [array[..., :rank], *to_halves(array[..., rank:], model)]


def _merge_latent(arrays: Sequence[np.ndarray], model: Model) -> np.ndarray:
    """Undo _split_latent."""
    return np.concatenate([arrays[0], to_neighbours(arrays[1:], model)], axis=-1)


def _split_head(array: np.ndarray, model: Model) -> list[np.ndarray]:
    """Split the last axis, a head, into its key and its value."""
    assert model.head_dim
    unrotated = model.head_dim - model.rotary_dim
    return [array[..., :unrotated], array[..., unrotated:]]


def _merge_head(arrays: Sequence[np.ndarray], model: Model) -> np.ndarray:
    """Undo _split_head."""
    return np.concatenate(arrays, axis=-1)


_ROWS = (
    WeightMapping(
        f"{_ATTENTION}.q_proj.weight",
        (f"{_PATH}/query",),
        QUERY_PATTERN,
        _to_rotated_first,
        _to_rotated_last,
    ),
    WeightMapping(f"{_ATTENTION}.q_a_proj.weight", (f"{_PATH}/query_down",), "l e -> e l"),
    WeightMapping(f"{_ATTENTION}.q_a_layernorm.weight", (f"{_PATH}/query_norm/scale",)),
    WeightMapping(
        f"{_ATTENTION}.q_b_proj.weight",
        (f"{_PATH}/query_up",),
        "(heads head_dim) l -> l heads head_dim",
        _to_rotated_first,
        _to_rotated_last,
    ),
    WeightMapping(
        f"{_ATTENTION}.kv_a_proj_with_mqa.weight",
        (f"{_PATH}/kv_down", f"{_PATH}/key_rope"),
        "l e -> e l",
        _split_latent,
        _merge_latent,
    ),
    WeightMapping(f"{_ATTENTION}.kv_a_layernorm.weight", (f"{_PATH}/kv_norm/scale",)),
    WeightMapping(
        f"{_ATTENTION}.kv_b_proj.weight",
        (f"{_PATH}/key_up", f"{_PATH}/value_up"),
        "(heads both) l -> l heads both",
        _split_head,
        _merge_head,
    ),
    WeightMapping(
        f"{_ATTENTION}.o_proj.weight",
        (f"{_PATH}/output",),
        "embed (heads v_head_dim) -> heads v_head_dim embed",
    ),
)

DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    (
        *(setting for setting in SIZES if setting.setting not in ("layers", "mlp")),
        *TIED_HEAD_SETTING,
        Rope(),
        _LatentSizes(),
        BalancedExperts(),
        FixedEntry("attention_bias", False),
        FixedEntry("rope_interleave", True),
    ),
    (
        *EMBEDDING_AND_HEAD_ROWS,
        *with_dense_layers((*NORMS, *_ROWS)),
        *MLPS,
        *ahead_rows((*NORMS, *_ROWS, *MLPS)),
        *AHEAD,
    ),
    ignored_tensors=IGNORED,
)
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")
