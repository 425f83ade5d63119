"""GPT-2: learned positions, weights of shape (in, out), query, key and value packed in one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphtrain.config.schema import Model
from graphtrain.weights.families.family import Config, Family, WeightMapping
from graphtrain.weights.families.settings import EnumSetting, FixedEntry, RenamedSetting

_QKV = ("layers/attention/query", "layers/attention/key", "layers/attention/value")
_BIASES = tuple(f"{path}_bias" for path in _QKV)
_LAYER = "transformer.h.{layer}"


@dataclass(frozen=True)
class _Inner:
    """Width of the MLP; null means 4 * n_embd."""

    def read(self, config: Config) -> dict[str, Any]:
        return {"mlp": config.get("n_inner") or 4 * config["n_embd"]}

    def write(self, model: Model) -> dict[str, Any]:
        return {"n_inner": model.mlp}


def layer_norm_rows(name: str, path: str) -> tuple[WeightMapping, WeightMapping]:
    """Return the rows of a LayerNorm's scale and bias."""
    return WeightMapping(f"{name}.weight", (f"{path}/scale",)), WeightMapping(
        f"{name}.bias", (f"{path}/bias",)
    )


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    (
        RenamedSetting("embed", "n_embd"),
        RenamedSetting("layers", "n_layer"),
        RenamedSetting("heads", "n_head"),
        RenamedSetting("vocab", "vocab_size"),
        RenamedSetting("max_position_embeddings", "n_positions"),
        _Inner(),
        RenamedSetting("norm_epsilon", "layer_norm_epsilon", 1e-5),
        EnumSetting(
            "activation",
            "activation_function",
            {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"},
            "gelu_new",
        ),
        RenamedSetting("tie_word_embeddings", "tie_word_embeddings", True),
        FixedEntry("scale_attn_weights", True),
        FixedEntry("scale_attn_by_inverse_layer_idx", False),
        FixedEntry("add_cross_attention", False),
    ),
    (
        WeightMapping("transformer.wte.weight", ("embedding/tokens",)),
        WeightMapping("transformer.wpe.weight", ("embedding/positions",)),
        *layer_norm_rows("transformer.ln_f", "final_norm"),
        WeightMapping("lm_head.weight", ("head",), "vocab embed -> embed vocab"),
        *layer_norm_rows(f"{_LAYER}.ln_1", "layers/attention_norm"),
        *layer_norm_rows(f"{_LAYER}.ln_2", "layers/mlp_norm"),
        WeightMapping(
            f"{_LAYER}.attn.c_attn.weight",
            _QKV,
            "embed (three heads head_dim) -> three embed heads head_dim",
        ),
        WeightMapping(
            f"{_LAYER}.attn.c_attn.bias", _BIASES, "(three heads head_dim) -> three heads head_dim"
        ),
        WeightMapping(
            f"{_LAYER}.attn.c_proj.weight",
            ("layers/attention/output",),
            "(heads head_dim) embed -> heads head_dim embed",
        ),
        WeightMapping(f"{_LAYER}.attn.c_proj.bias", ("layers/attention/output_bias",)),
        WeightMapping(f"{_LAYER}.mlp.c_fc.weight", ("layers/mlp/up",)),
        WeightMapping(f"{_LAYER}.mlp.c_fc.bias", ("layers/mlp/up_bias",)),
        WeightMapping(f"{_LAYER}.mlp.c_proj.weight", ("layers/mlp/down",)),
        WeightMapping(f"{_LAYER}.mlp.c_proj.bias", ("layers/mlp/down_bias",)),
    ),
    fixed_settings={"positions": "learned", "norm": "layer", "bias": "all"},
    prefix="transformer.",
    ignored_tensors=(r".*\.attn\.bias", r".*\.attn\.masked_bias"),
)
