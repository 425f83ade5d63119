"""MindFormers' names of Llama's tensors, and which models have its function."""

from __future__ import annotations

from dataclasses import replace

from graphtrain.config.schema import Model
from graphtrain.errors import WeightsError
from graphtrain.weights.families.family import Family
from graphtrain.weights.families.llama import LLAMA
from graphtrain.weights.families.qwen import QWEN2

_RENAMED = (
    ("embed_tokens.weight", "tok_embeddings.embedding_weight"),
    (".self_attn.q_proj.", ".attention.wq."),
    (".self_attn.k_proj.", ".attention.wk."),
    (".self_attn.v_proj.", ".attention.wv."),
    (".self_attn.o_proj.", ".attention.wo."),
    (".mlp.gate_proj.", ".feed_forward.w1."),
    (".mlp.down_proj.", ".feed_forward.w2."),
    (".mlp.up_proj.", ".feed_forward.w3."),
    (".input_layernorm.", ".attention_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".norm.", ".norm_out."),
)
_SHARDED_ON_0 = (".wq.", ".wk.", ".wv.", ".w1.", ".w3.")
_SHARDED_ON_1 = (".wo.weight", ".w2.weight")
_OF_VOCABULARY = ("embedding_weight", "lm_head.weight")


def mindformers_llama() -> Family:
    """Return the table of MindFormers' Llama, which has the shapes of Hugging Face's."""

    def renamed(name: str) -> str:
        for theirs, ours in _RENAMED:
            name = name.replace(theirs, ours)
        return name

    rows = tuple(replace(row, name=renamed(row.name)) for row in LLAMA.mappings)
    return replace(LLAMA, model_type="mindformers llama", mappings=rows)


def check_llama(model: Model) -> None:
    """Check that MindFormers' Llama computes the function of a model.

    Raises:
        WeightsError: it does not.
    """
    known = LLAMA.supports(model) or QWEN2.supports(model)
    # These families also have what MindFormers' Llama has not.
    others = model.activation != "swiglu" or model.sliding_window
    if not known or others or model.head_dim != model.embed // model.heads:
        raise WeightsError(
            "MindFormers' Llama has RMSNorm, SwiGLU, rotary positions, head_dim = embed / heads, "
            "no sliding window, and biases of attention, of its queries, keys and values, or none; "
            "this model has other settings in [program.model]. Export it to Hugging Face "
            "(graphtrain convert graphtrain-to-hf)"
        )


def shard_axis(name: str, shape: tuple[int, ...], ranks: int) -> int | None:
    """Return the axis along which tensor ranks shard a tensor; None if it is replicated.

    The vocabulary is replicated if the ranks do not divide it.
    """
    if any(part in name for part in _SHARDED_ON_0):
        return 0
    if name.endswith(_SHARDED_ON_1):
        return 1
    return 0 if name.endswith(_OF_VOCABULARY) and shape[0] % ranks == 0 else None
