"""BLOOM: ALiBi, LayerNorm after the embedding; query, key and value interleaved by head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphtrain.config.schema import Model
from graphtrain.errors import WeightsError
from graphtrain.weights.families.family import Config, Family, WeightMapping
from graphtrain.weights.families.gpt2 import layer_norm_rows
from graphtrain.weights.families.llama import DOWN_PROJECTION, OUTPUT_PATTERN, UP_PROJECTION
from graphtrain.weights.families.settings import FixedEntry, RenamedSetting

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
        RenamedSetting("vocab", "vocab_size"),
        RenamedSetting("norm_epsilon", "layer_norm_epsilon", 1e-5),
        RenamedSetting("tie_word_embeddings", "tie_word_embeddings", True),
        FixedEntry("apply_residual_connection_post_layernorm", False),
    ),
    (
        WeightMapping("transformer.word_embeddings.weight", ("embedding/tokens",)),
        *layer_norm_rows("transformer.word_embeddings_layernorm", "embedding/norm"),
        *layer_norm_rows("transformer.ln_f", "final_norm"),
        WeightMapping("lm_head.weight", ("head",), "vocab embed -> embed vocab"),
        *layer_norm_rows(f"{_LAYER}.input_layernorm", "layers/attention_norm"),
        *layer_norm_rows(f"{_LAYER}.post_attention_layernorm", "layers/mlp_norm"),
        WeightMapping(
            f"{_LAYER}.self_attention.query_key_value.weight",
            _QKV,
            "(heads three head_dim) embed -> three embed heads head_dim",
        ),
        WeightMapping(
            f"{_LAYER}.self_attention.query_key_value.bias",
            _BIASES,
            "(heads three head_dim) -> three heads head_dim",
        ),
        WeightMapping(
            f"{_LAYER}.self_attention.dense.weight", ("layers/attention/output",), OUTPUT_PATTERN
        ),
        WeightMapping(f"{_LAYER}.self_attention.dense.bias", ("layers/attention/output_bias",)),
        WeightMapping(f"{_LAYER}.mlp.dense_h_to_4h.weight", ("layers/mlp/up",), UP_PROJECTION),
        WeightMapping(f"{_LAYER}.mlp.dense_h_to_4h.bias", ("layers/mlp/up_bias",)),
        WeightMapping(f"{_LAYER}.mlp.dense_4h_to_h.weight", ("layers/mlp/down",), DOWN_PROJECTION),
        WeightMapping(f"{_LAYER}.mlp.dense_4h_to_h.bias", ("layers/mlp/down_bias",)),
    ),
    fixed_settings={
        "positions": "alibi",
        "norm": "layer",
        "bias": "all",
        "activation": "gelu_tanh",
        "embedding_norm": True,
    },
    prefix="transformer.",
)
