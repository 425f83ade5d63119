"""Llama 1, 2 and 3.x, and families that differ only in settings: Mistral and Aquila."""

from graphtrain.weights.families.family import Family, Row
from graphtrain.weights.families.settings import Choice, Key, Only, Rope, Window

GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}

SIZES = (
    Key("layers", "num_hidden_layers"),
    Key("embed", "hidden_size"),
    Key("heads", "num_attention_heads"),
    Key("mlp", "intermediate_size"),
    Key("vocab", "vocab_size"),
    Key("norm_epsilon", "rms_norm_eps", 1e-6),
    Choice("activation", "hidden_act", GATED, "silu"),
)
GROUPED = (Key("kv_heads", "num_key_value_heads", None), Key("head_dim", "head_dim", None))
HEAD = (Key("tied_head", "tie_word_embeddings", False),)

QUERY = "(heads head_dim) embed -> embed heads head_dim"
KEY = "(kv_heads head_dim) embed -> embed kv_heads head_dim"
OUTPUT = "embed (heads head_dim) -> heads head_dim embed"
WIDEN, NARROW = "mlp embed -> embed mlp", "embed mlp -> mlp embed"
_ATTENTION, _MLP = "model.layers.{layer}.self_attn", "model.layers.{layer}.mlp"

TABLES = (
    Row("model.embed_tokens.weight", ("embedding/tokens",)),
    Row("model.norm.weight", ("final_norm/scale",)),
    Row("lm_head.weight", ("head",), "vocab embed -> embed vocab"),
)
NORMS = (
    Row("model.layers.{layer}.input_layernorm.weight", ("layers/attention_norm/scale",)),
    Row("model.layers.{layer}.post_attention_layernorm.weight", ("layers/mlp_norm/scale",)),
)
ATTENTION = (
    Row(f"{_ATTENTION}.q_proj.weight", ("layers/attention/query",), QUERY),
    Row(f"{_ATTENTION}.k_proj.weight", ("layers/attention/key",), KEY),
    Row(f"{_ATTENTION}.v_proj.weight", ("layers/attention/value",), KEY),
    Row(f"{_ATTENTION}.o_proj.weight", ("layers/attention/output",), OUTPUT),
    Row(
        f"{_ATTENTION}.q_proj.bias",
        ("layers/attention/query_bias",),
        "(heads head_dim) -> heads head_dim",
    ),
    Row(
        f"{_ATTENTION}.k_proj.bias",
        ("layers/attention/key_bias",),
        "(kv_heads head_dim) -> kv_heads head_dim",
    ),
    Row(
        f"{_ATTENTION}.v_proj.bias",
        ("layers/attention/value_bias",),
        "(kv_heads head_dim) -> kv_heads head_dim",
    ),
    Row(f"{_ATTENTION}.o_proj.bias", ("layers/attention/output_bias",)),
    Row(f"{_ATTENTION}.q_norm.weight", ("layers/attention/query_norm/scale",)),
    Row(f"{_ATTENTION}.k_norm.weight", ("layers/attention/key_norm/scale",)),
)
MLP = (
    Row(f"{_MLP}.gate_proj.weight", ("layers/mlp/gate",), WIDEN),
    Row(f"{_MLP}.up_proj.weight", ("layers/mlp/up",), WIDEN),
    Row(f"{_MLP}.down_proj.weight", ("layers/mlp/down",), NARROW),
)
ROWS = (*TABLES, *NORMS, *ATTENTION, *MLP)

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    (
        *SIZES,
        *GROUPED,
        *HEAD,
        Rope(),
        Choice("bias", "attention_bias", {False: "none", True: "attention"}, False),
        Only("mlp_bias", False),
    ),
    ROWS,
)
MISTRAL = Family("mistral", "MistralForCausalLM", (*SIZES, *GROUPED, *HEAD, Rope(), Window()), ROWS)
AQUILA = Family(
    "aquila",
    "AquilaForCausalLM",
    (*SIZES, Key("kv_heads", "num_key_value_heads", None), *HEAD, Rope()),
    ROWS,
)
