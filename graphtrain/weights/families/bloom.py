"""BLOOM: ALiBi, LayerNorm after the embedding; query, key and value interleaved by head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphtrain.config.schema import Model
from graphtrain.errors import WeightsError
from graphtrain.weights.families.family import Config, Family, Row
from graphtrain.weights.families.gpt2 import norm
from graphtrain.weights.families.llama import NARROW, OUTPUT, WIDEN
from graphtrain.weights.families.settings import Key, Only

_QKV = ("layers/attention/query", "layers/attention/key", "layers/attention/value")
_BIASES = tuple(f"{path}_bias" for path in _QKV)
_LAYER = "transformer.h.{layer}"


@dataclass(frozen=True)
class _Sizes:
    """Model sizes, under all names that BLOOM has used; the MLP width is 4 * embed."""

    def read(self, config: Config) -> dict[str, Any]:
        embed = config.get("hidden_size") or config.get("n_embed")
        layers = config.get("n_layer") or config.get("num_hidden_layers")
        heads = config.get("n_head") or config.get("num_attention_heads")
        if not (embed and layers and heads):
            raise WeightsError(
                "config.json: hidden_size, n_layer or n_head is missing; all three are required"
            )
        return {"embed": embed, "mlp": 4 * embed, "layers": layers, "heads": heads}

    def write(self, model: Model) -> dict[str, Any]:
        return {"hidden_size": model.embed, "n_layer": model.layers, "n_head": model.heads}


BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    (
        _Sizes(),
        Key("vocab", "vocab_size"),
        Key("norm_epsilon", "layer_norm_epsilon", 1e-5),
        Key("tied_head", "tie_word_embeddings", True),
        Only("apply_residual_connection_post_layernorm", False),
    ),
    (
        Row("transformer.word_embeddings.weight", ("embedding/tokens",)),
        *norm("transformer.word_embeddings_layernorm", "embedding/norm"),
        *norm("transformer.ln_f", "final_norm"),
        Row("lm_head.weight", ("head",), "vocab embed -> embed vocab"),
        *norm(f"{_LAYER}.input_layernorm", "layers/attention_norm"),
        *norm(f"{_LAYER}.post_attention_layernorm", "layers/mlp_norm"),
        Row(
            f"{_LAYER}.self_attention.query_key_value.weight",
            _QKV,
            "(heads three head_dim) embed -> three embed heads head_dim",
        ),
        Row(
            f"{_LAYER}.self_attention.query_key_value.bias",
            _BIASES,
            "(heads three head_dim) -> three heads head_dim",
        ),
        Row(f"{_LAYER}.self_attention.dense.weight", ("layers/attention/output",), OUTPUT),
        Row(f"{_LAYER}.self_attention.dense.bias", ("layers/attention/output_bias",)),
        Row(f"{_LAYER}.mlp.dense_h_to_4h.weight", ("layers/mlp/up",), WIDEN),
        Row(f"{_LAYER}.mlp.dense_h_to_4h.bias", ("layers/mlp/up_bias",)),
        Row(f"{_LAYER}.mlp.dense_4h_to_h.weight", ("layers/mlp/down",), NARROW),
        Row(f"{_LAYER}.mlp.dense_4h_to_h.bias", ("layers/mlp/down_bias",)),
    ),
    always={
        "positions": "alibi",
        "norm": "layer",
        "bias": "all",
        "activation": "gelu_tanh",
        "embedding_norm": True,
    },
    prefix="transformer.",
)
