"""Llama 1, 2 and 3.x, and families that differ only in settings: Mistral and Aquila."""

from graphtrain.weights.families.family import Family, WeightMapping
from graphtrain.weights.families.settings import (
    EnumSetting,
    FixedEntry,
    RenamedSetting,
    Rope,
    SlidingWindow,
)

ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}

SIZES = (
    RenamedSetting("layers", "num_hidden_layers"),
    RenamedSetting("embed", "hidden_size"),
    RenamedSetting("heads", "num_attention_heads"),
    RenamedSetting("mlp", "intermediate_size"),
    RenamedSetting("vocab", "vocab_size"),
    RenamedSetting("norm_epsilon", "rms_norm_eps", 1e-6),
    EnumSetting("activation", "hidden_act", ACTIVATIONS, "silu"),
)
GROUPED_QUERY_SETTINGS = (
    RenamedSetting("kv_heads", "num_key_value_heads", None),
    RenamedSetting("head_dim", "head_dim", None),
)
TIED_HEAD_SETTING = (RenamedSetting("tie_word_embeddings", "tie_word_embeddings", False),)

QUERY_PATTERN = "(heads head_dim) embed -> embed heads head_dim"
KEY_PATTERN = "(kv_heads head_dim) embed -> embed kv_heads head_dim"
OUTPUT_PATTERN = "embed (heads head_dim) -> heads head_dim embed"
UP_PROJECTION, DOWN_PROJECTION = "mlp embed -> embed mlp", "embed mlp -> mlp embed"
_ATTENTION, _MLP = "model.layers.{layer}.self_attn", "model.layers.{layer}.mlp"

EMBEDDING_AND_HEAD_ROWS = (
    WeightMapping("model.embed_tokens.weight", ("embedding/tokens",)),
    WeightMapping("model.norm.weight", ("final_norm/scale",)),
    WeightMapping("lm_head.weight", ("head",), "vocab embed -> embed vocab"),
)
NORMS = (
    WeightMapping("model.layers.{layer}.input_layernorm.weight", ("layers/attention_norm/scale",)),
    WeightMapping(
        "model.layers.{layer}.post_attention_layernorm.weight", ("layers/mlp_norm/scale",)
    ),
)
ATTENTION = (
    WeightMapping(f"{_ATTENTION}.q_proj.weight", ("layers/attention/query",), QUERY_PATTERN),
    WeightMapping(f"{_ATTENTION}.k_proj.weight", ("layers/attention/key",), KEY_PATTERN),
    WeightMapping(f"{_ATTENTION}.v_proj.weight", ("layers/attention/value",), KEY_PATTERN),
    WeightMapping(f"{_ATTENTION}.o_proj.weight", ("layers/attention/output",), OUTPUT_PATTERN),
    WeightMapping(
        f"{_ATTENTION}.q_proj.bias",
        ("layers/attention/query_bias",),
        "(heads head_dim) -> heads head_dim",
    ),
    WeightMapping(
        f"{_ATTENTION}.k_proj.bias",
        ("layers/attention/key_bias",),
        "(kv_heads head_dim) -> kv_heads head_dim",
    ),
    WeightMapping(
        f"{_ATTENTION}.v_proj.bias",
        ("layers/attention/value_bias",),
        "(kv_heads head_dim) -> kv_heads head_dim",
    ),
    WeightMapping(f"{_ATTENTION}.o_proj.bias", ("layers/attention/output_bias",)),
    WeightMapping(f"{_ATTENTION}.q_norm.weight", ("layers/attention/query_norm/scale",)),
    WeightMapping(f"{_ATTENTION}.k_norm.weight", ("layers/attention/key_norm/scale",)),
)
MLP = (
    WeightMapping(f"{_MLP}.gate_proj.weight", ("layers/mlp/gate",), UP_PROJECTION),
    WeightMapping(f"{_MLP}.up_proj.weight", ("layers/mlp/up",), UP_PROJECTION),
    WeightMapping(f"{_MLP}.down_proj.weight", ("layers/mlp/down",), DOWN_PROJECTION),
)
ROWS = (*EMBEDDING_AND_HEAD_ROWS, *NORMS, *ATTENTION, *MLP)

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    (
        *SIZES,
        *GROUPED_QUERY_SETTINGS,
        *TIED_HEAD_SETTING,
        Rope(),
        EnumSetting("bias", "attention_bias", {False: "none", True: "attention"}, False),
        FixedEntry("mlp_bias", False),
    ),
    ROWS,
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    (*SIZES, *GROUPED_QUERY_SETTINGS, *TIED_HEAD_SETTING, Rope(), SlidingWindow()),
    ROWS,
)
AQUILA = Family(
    "aquila",
    "AquilaForCausalLM",
    (*SIZES, RenamedSetting("kv_heads", "num_key_value_heads", None), *TIED_HEAD_SETTING, Rope()),
    ROWS,
)
