"""Parameters and floating-point operations of a model, by arithmetic; imports no JAX."""

from typing import Literal

from graphtrain.config.schema import Model, Program, scored_layers

Part = Literal["attention projections", "attention scores", "MLP", "LM head"]


# Array axes of latent attention, whose sizes are not settings of the same name.
LATENT_AXES = (
    "q_lora", "q_latent", "kv_lora", "kv_latent", "nope_head_dim", "rope_head_dim", "v_head_dim",
)  # fmt: skip


def latent_size(model: Model, axis: str) -> int:
    """Return the size of one of LATENT_AXES."""
    latent = model.latent_attention
    assert latent is not None and model.head_dim
    sizes = {
        "q_lora": latent.q_lora_rank or 0,
        "kv_lora": latent.kv_lora_rank,
        "nope_head_dim": model.head_dim - latent.qk_rope_head_dim,
        "rope_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
    }
    return sizes[axis.replace("latent", "lora")]


def value_head_dim(model: Model) -> int:
    """Return the width of a value head, which is head_dim without latent attention."""
    assert model.head_dim
    return model.latent_attention.v_head_dim if model.latent_attention else model.head_dim


def parameter_count(model: Model) -> int:
    """Return the number of elements in all parameters; a tied head counts once."""
    return _weights(model) + _biases(model) + _scales(model) + _tables(model)


def flops_per_token(model: Model, length: int) -> float:
    """Return a training step's floating-point operations per token, without recomputation.

    Every weight of a matrix product counts two operations forward and four backward. The LM head
    counts even if tied; the embedding lookup does not. Attention counts all scores, as if there
    were no causal mask. `length` is the sequence length in tokens.

    Source: Chowdhery et al. 2022, "PaLM", appendix B, https://arxiv.org/abs/2204.02311
    """
    return 3 * sum(forward_flops_by_part(model, length).values())


def forward_flops_by_part(model: Model, length: int) -> dict[Part, float]:
    """Return the forward pass's part of flops_per_token, by part of the model."""
    embed, blocks = model.embed, model.depth + model.ahead_layers
    projections = blocks * _attention_weights(model)
    mlp = _weights(model, active=True) - projections
    return {
        "attention projections": 2 * projections,
        "attention scores": attention_flops_per_token(model, length) / 3,
        "MLP": 2 * mlp,
        "LM head": 2 * embed * model.vocab * (1 + model.ahead_layers),
    }


def step_flops_per_token(program: Program, *, causal: bool = False) -> float:
    """Return the operations per token of a program's training step, without recomputation.

    Frozen weights count one product forward and one backward, because they have no gradients.
    DPO's reference model counts one more forward pass. The products of LoRA factors are neglected.
    Choices that the capacity of a mixture's experts drops in any case are not computed.

    Args:
        program: Settings.
        causal: Count only the half of attention's scores that the causal mask leaves.
    """
    model, length = program.model, program.batch.seq_len
    total, attention = (
        flops_per_token(model, length),
        attention_flops_per_token(model, length),
    )
    if model.moe and model.moe.capacity_factor:
        total -= max(0.0, 1 - model.moe.capacity_factor) * expert_flops_per_token(model)
    if causal:
        total, attention = total - attention / 2, attention / 2
    flops = total if program.adapter is None else total - (total - attention) / 3
    return flops + total / 3 if program.loss.kind == "dpo" else flops


def useful_flops_per_token(program: Program) -> dict[str, float]:
    """Return a training step's operations per token for each metric of utilization, by name."""
    return {
        name: step_flops_per_token(program, causal=causal)
        for name, causal in (("mfu", False), ("mfu_causal", True))
    }


def attention_flops_per_token(model: Model, length: int) -> float:
    """Return the part of flops_per_token that computes scores and their products with values."""
    assert model.head_dim
    widths = model.heads * (model.head_dim + value_head_dim(model))
    layers = scored_layers(model) * (model.depth + model.ahead_layers)
    return 6.0 * layers * widths * length


def expert_flops_per_token(model: Model) -> float:
    """Return the part of flops_per_token of a token's chosen experts; 0.0 without a mixture."""
    if (mixture := model.moe) is None:
        return 0.0
    matrices = 3 if is_gated(model) else 2
    layers = model.layers + model.ahead_layers
    return 6.0 * layers * mixture.experts_per_token * matrices * model.embed * model.mlp


def _weights(model: Model, *, active: bool = False) -> int:
    """Return the weights in the layers' matrix products; of a mixture, all or only active ones."""
    embed, attention = model.embed, _attention_weights(model)
    mlp = (3 if is_gated(model) else 2) * embed * model.mlp
    if (mixture := model.moe) is not None:
        experts = mixture.experts_per_token if active else mixture.experts
        shared = (
            (3 if is_gated(model) else 2) * embed * mixture.shared_expert_mlp
            + embed * mixture.shared_expert_gate
            if mixture.shared_expert_mlp
            else 0
        )
        mlp = experts * mlp + embed * mixture.experts + shared
    ahead = model.ahead_layers * (attention + mlp + 2 * embed * embed)
    dense = model.dense_layers * _dense_mlp(model)
    return model.depth * attention + model.layers * mlp + dense + ahead


def _attention_weights(model: Model) -> int:
    """Return the weights in the products of one layer's attention."""
    embed, query, key = _widths(model)
    if (latent := model.latent_attention) is None:
        return 2 * embed * query + 2 * embed * key
    queries = embed * query
    if latent.q_lora_rank is not None:
        queries = latent.q_lora_rank * (embed + query)
    values = model.heads * latent.v_head_dim
    unrotated = query - model.heads * latent.qk_rope_head_dim
    latents = embed * (latent.kv_lora_rank + latent.qk_rope_head_dim)
    return queries + latents + latent.kv_lora_rank * (unrotated + values) + values * embed


def _dense_mlp(model: Model) -> int:
    """Return the weights in the products of one MLP of the dense layers before a mixture's."""
    width = (model.moe and model.moe.dense_mlp) or 0
    return (3 if is_gated(model) else 2) * model.embed * width


def _biases(model: Model) -> int:
    embed, query, key = _widths(model)
    qkv = query + 2 * key
    hidden = (2 if is_gated(model) else 1) * model.mlp
    attention = qkv + embed
    biases_per_layer = {
        "none": 0,
        "qkv": qkv,
        "attention": attention,
        "all": attention,
    }
    mixture = model.moe
    total = (model.depth + model.ahead_layers) * biases_per_layer[model.bias]
    if model.bias == "all":
        total += _mlp_biases(model)
    of_experts = 0
    if mixture is not None:
        of_experts = mixture.experts * (1 + hidden + embed) if mixture.expert_bias else 0
        of_experts += mixture.experts if mixture.bias_update_rate is not None else 0
    return total + (model.layers + model.ahead_layers) * of_experts


def _mlp_biases(model: Model) -> int:
    """Return the elements of the biases of all MLPs that are no experts."""
    widths = 2 if is_gated(model) else 1
    if (mixture := model.moe) is None:
        return (model.layers + model.ahead_layers) * (widths * model.mlp + model.embed)
    return model.dense_layers * (widths * (mixture.dense_mlp or 0) + model.embed)


def _scales(model: Model) -> int:
    assert model.head_dim
    blocks = model.depth + model.ahead_layers
    norms = (4 if model.post_norm else 2) * blocks + 1 + model.embedding_norm
    norms += 3 * model.ahead_layers
    heads = 2 * blocks * model.head_dim if model.qk_norm else 0
    if (latent := model.latent_attention) is not None:
        heads += blocks * ((latent.q_lora_rank or 0) + latent.kv_lora_rank)
    sinks = blocks * model.heads if model.attention_sinks else 0
    return (norms * model.embed + heads) * (2 if norm_has_bias(model) else 1) + sinks


def _tables(model: Model) -> int:
    heads = 1 if model.tie_word_embeddings else 2
    return heads * model.vocab * model.embed + (model.max_position_embeddings or 0) * model.embed


def _widths(model: Model) -> tuple[int, int, int]:
    """Return the widths of the residual stream, of all query heads, and of all key heads."""
    assert model.head_dim and model.kv_heads
    return model.embed, model.heads * model.head_dim, model.kv_heads * model.head_dim


def is_gated(model: Model) -> bool:
    """Return whether the MLP is gated: it multiplies two projections of its input."""
    return model.activation not in ("gelu", "gelu_tanh")


def norm_has_bias(model: Model) -> bool:
    """Return whether norms have a bias; an RMSNorm never does."""
    return model.norm == "layer" and model.bias == "all"
