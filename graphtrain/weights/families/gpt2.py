"""GPT-2: learned positions, weights of shape (in, out), query, key and value packed in one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphtrain.config.schema import Model
from graphtrain.weights.families.family import Config, Family, Row
from graphtrain.weights.families.settings import Choice, Key, Only

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


def norm(name: str, path: str) -> tuple[Row, Row]:
    """Return the rows of a LayerNorm's scale and bias."""
    return Row(f"{name}.weight", (f"{path}/scale",)), Row(f"{name}.bias", (f"{path}/bias",))


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    (
        Key("embed", "n_embd"),
        Key("layers", "n_layer"),
        Key("heads", "n_head"),
        Key("vocab", "vocab_size"),
        Key("max_length", "n_positions"),
        _Inner(),
        Key("norm_epsilon", "layer_norm_epsilon", 1e-5),
        Choice(
            "activation",
            "activation_function",
            {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"},
            "gelu_new",
        ),
        Key("tied_head", "tie_word_embeddings", True),
        Only("scale_attn_weights", True),
        Only("scale_attn_by_inverse_layer_idx", False),
        Only("add_cross_attention", False),
    ),
    (
        Row("transformer.wte.weight", ("embedding/tokens",)),
        Row("transformer.wpe.weight", ("embedding/positions",)),
        *norm("transformer.ln_f", "final_norm"),
        Row("lm_head.weight", ("head",), "vocab embed -> embed vocab"),
        *norm(f"{_LAYER}.ln_1", "layers/attention_norm"),
        *norm(f"{_LAYER}.ln_2", "layers/mlp_norm"),
        Row(
            f"{_LAYER}.attn.c_attn.weight",
            _QKV,
            "embed (three heads head_dim) -> three embed heads head_dim",
        ),
        Row(
            f"{_LAYER}.attn.c_attn.bias", _BIASES, "(three heads head_dim) -> three heads head_dim"
        ),
        Row(
            f"{_LAYER}.attn.c_proj.weight",
            ("layers/attention/output",),
            "(heads head_dim) embed -> heads head_dim embed",
        ),
        Row(f"{_LAYER}.attn.c_proj.bias", ("layers/attention/output_bias",)),
        Row(f"{_LAYER}.mlp.c_fc.weight", ("layers/mlp/up",)),
        Row(f"{_LAYER}.mlp.c_fc.bias", ("layers/mlp/up_bias",)),
        Row(f"{_LAYER}.mlp.c_proj.weight", ("layers/mlp/down",)),
        Row(f"{_LAYER}.mlp.c_proj.bias", ("layers/mlp/down_bias",)),
    ),
    always={"positions": "learned", "norm": "layer", "bias": "all"},
    prefix="transformer.",
    without_weights=(r".*\.attn\.bias", r".*\.attn\.masked_bias"),
)
