"""[program.model]: the native decoder-only transformer."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from graphtrain.config.schema.types import (
    MAX_LAYERS,
    STRICT,
    ComputeDtype,
    Count,
    DropoutRate,
    NotNegative,
    NotNegativeFloat,
    Positive,
    PositiveFloat,
    Width,
    set_derived_defaults,
)

# Activation checkpointing: what the backward pass recomputes. none: nothing. attention: attention
# scores and softmax. dots: everything but products with weights. full: everything. offload: as
# dots, with those products offloaded to host memory.
Remat = Literal["none", "attention", "dots", "full", "offload"]

# dense: matrix products, with all attention scores in memory. flash: a kernel of the target that
# never stores the scores. auto: flash if the target has a kernel for the model, else dense.
AttentionImplementation = Literal["auto", "flash", "dense"]

ScoreFunction = Literal["softmax", "sigmoid"]

RotaryFraction = Annotated[float, Field(gt=0, le=1)]

Activation = Literal["swiglu", "swiglu_clamped", "geglu", "geglu_tanh", "gelu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MixtureOfExperts:
    """A mixture of experts in place of every MLP; a router sends each token to a few experts.

    Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538
    """

    experts: Annotated[int, Field(ge=2)]  # number of experts in a layer
    experts_per_token: Positive = 2  # experts that process each token (top-k)
    normalize_topk: bool = True  # scale the gate weights of a token's experts to sum to 1
    dense_layers: NotNegative = 0  # layers with an MLP of dense_mlp before those of the mixture
    dense_mlp: Width | None = None  # hidden width of the MLP of the dense_layers
    score_function: ScoreFunction = "softmax"  # of the router: over experts, or of each by itself
    bias_update_rate: NotNegativeFloat | None = None  # balances experts by a bias, DeepSeek-V3
    groups: Annotated[int, Field(ge=2)] | None = None  # experts are in groups; unset: in one
    groups_per_token: Positive | None = None  # groups among whose experts a token chooses
    routed_scaling_factor: PositiveFloat = 1.0  # of the weights of a token's experts
    expert_bias: bool = False  # router and experts add a bias to their products (gpt-oss)
    shared_expert_mlp: Width | None = None  # hidden width of an expert for every token
    shared_expert_gate: bool = True  # scale the shared expert by a sigmoid of the token (Qwen)
    capacity_factor: PositiveFloat | None = None  # tokens per expert over the mean; unset: dropless
    balance_loss: NotNegativeFloat = 0.01  # weight of Switch's loss (arxiv.org/abs/2101.03961)
    router_z_loss: NotNegativeFloat = 0.001  # weight of log(Z)^2, ST-MoE (arxiv.org/abs/2202.08906)

    def __post_init__(self) -> None:
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token = {self.experts_per_token} is more than "
                f"experts = {self.experts}"
            )
        if (self.dense_layers > 0) != (self.dense_mlp is not None):
            raise ValueError("dense_layers and dense_mlp belong together; set both, or neither")
        self._check_groups()

    def _check_groups(self) -> None:
        groups, chosen = self.groups, self.groups_per_token
        if (groups is None) != (chosen is None):
            raise ValueError("groups and groups_per_token belong together; set both, or neither")
        if groups is None or chosen is None:
            return
        if self.experts % groups or self.experts // groups < 2:
            raise ValueError(
                f"experts = {self.experts} is not a multiple of groups = {groups}, with at least "
                "2 experts in each"
            )
        if chosen > groups or self.experts_per_token > chosen * self.experts // groups:
            raise ValueError(
                f"groups_per_token = {chosen} must be at most groups = {groups}, and enough for "
                f"experts_per_token = {self.experts_per_token} experts"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RopeScaling:
    """Scaling of the rotary angles of a model that was extended to longer sequences.

    Source: linear: Chen et al. 2023, https://arxiv.org/abs/2306.15595; dynamic: NTK-aware scaling,
    and yarn: Peng et al. 2023, https://arxiv.org/abs/2309.00071; longrope: Ding et al. 2024,
    https://arxiv.org/abs/2402.13753; llama3: the function apply_scaling of
    https://github.com/meta-llama/llama-models, models/llama3/model.py. All as transformers.
    """

    kind: Literal["linear", "dynamic", "yarn", "longrope", "llama3"]  # which angles are scaled
    factor: PositiveFloat  # how many times longer sequences are; divisor of scaled angles
    low_freq_factor: PositiveFloat | None = None  # llama3: fewer turns than this are scaled fully
    high_freq_factor: PositiveFloat | None = None  # llama3: more turns than this are not scaled
    original_max_position_embeddings: Positive | None = None  # tokens before the extension
    attention_factor: PositiveFloat | None = None  # yarn, longrope: of sines; unset: from factor
    beta_fast: PositiveFloat | None = None  # yarn: more turns are not scaled; unset: 32
    beta_slow: PositiveFloat | None = None  # yarn: fewer turns are scaled fully; unset: 1
    mscale: PositiveFloat | None = None  # yarn: numerator of attention_factor (DeepSeek)
    mscale_all_dim: PositiveFloat | None = None  # yarn: denominator of attention_factor (DeepSeek)
    truncate: bool | None = None  # yarn: round the range of scaled angles; unset: true
    short_factor: tuple[PositiveFloat, ...] | None = None  # longrope: divisors up to the original
    long_factor: tuple[PositiveFloat, ...] | None = None  # longrope: divisors for longer seq_len

    def __post_init__(self) -> None:
        required, optional = _SCALING_SETTINGS[self.kind]
        if missing := [name for name in required if getattr(self, name) is None]:
            raise ValueError(f'kind = "{self.kind}" needs {", ".join(missing)}')
        others = {name for names in _SCALING_SETTINGS.values() for name in (*names[0], *names[1])}
        unused = [
            name
            for name in sorted(others.difference(required, optional))
            if getattr(self, name) is not None
        ]
        if unused:
            raise ValueError(f'kind = "{self.kind}" does not take {", ".join(unused)}; remove it')
        low, high = self.low_freq_factor, self.high_freq_factor
        if low and high and low >= high:
            raise ValueError(f"low_freq_factor = {low} is not below high_freq_factor = {high}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LatentAttention:
    """Multi-head latent attention (MLA): keys and values are products of one narrow latent.

    The first dimensions of each head are rotated, and their keys are the same for all heads. KV
    caches hold the latent and these keys. Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1,
    https://arxiv.org/abs/2405.04434
    """

    kv_lora_rank: Width  # width of the latent of keys and values
    q_lora_rank: Width | None = None  # width of the latent of queries; unset: queries have none
    qk_rope_head_dim: Width  # dimensions of head_dim that are rotated
    v_head_dim: Width  # width of a value head


_ORIGINAL = "original_max_position_embeddings"
# Settings of each kind of scaling besides factor: those that it needs, and optional ones.
_SCALING_SETTINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": ((), ()),
    "dynamic": ((_ORIGINAL,), ()),
    "yarn": (
        (_ORIGINAL,),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": ((_ORIGINAL, "short_factor", "long_factor"), ("attention_factor",)),
    "llama3": ((_ORIGINAL, "low_freq_factor", "high_freq_factor"), ()),
}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Model:
    """A decoder-only transformer. Defaults are Llama's; GPT-2 is a choice of the settings."""

    layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]  # transformer blocks after moe.dense_layers
    embed: Width  # width of the residual stream (hidden size)
    heads: Width  # number of query heads
    kv_heads: Width | None = None  # number of key and value heads; unset: as many as heads
    head_dim: Width | None = None  # width of a head; unset: embed / heads
    mlp: Width  # hidden width of the MLP (intermediate size)
    vocab: Count  # rows of the embedding; unset: vocabulary of the data, padded
    vocab_padding: Positive | None = None  # last rows that stand for no token: never predicted
    positions: Literal["rope", "learned", "alibi"] = "rope"  # position encoding
    rope_theta: PositiveFloat = 10_000.0  # base of the rotary angles
    rope_scaling: RopeScaling | None = None  # scaling of the rotary angles; unset: none
    partial_rotary_factor: RotaryFraction = 1.0  # part of head_dim, from its start, that is rotated
    sliding_window: Positive | None = None  # tokens a query attends to; unset: all before it
    global_attention_every: Positive | None = None  # every n-th layer has no window; unset: none
    sliding_window_rope_theta: PositiveFloat | None = None  # rope_theta of layers with a window
    max_position_embeddings: Count | None = None  # rows of the learned position table
    norm: Literal["rms", "layer"] = "rms"  # RMSNorm or LayerNorm
    norm_epsilon: PositiveFloat = 1e-5  # added to the variance
    rms_norm_offset: bool = False  # norms multiply by 1 + scale, and scale starts at 0 (Gemma)
    embedding_norm: bool = False  # normalize the output of the embedding (Bloom)
    attention_sinks: bool = False  # a learned logit per head takes part in the softmax (gpt-oss)
    qk_norm: bool = False  # normalize queries and keys over head_dim (Qwen3, Gemma 3)
    post_norm: bool = False  # normalize the outputs of attention and MLP as well (Gemma 2)
    activation: Activation = "swiglu"  # of the MLP; the *glu ones have a gate
    bias: Literal["none", "qkv", "attention", "all"] = "none"  # which products add a bias
    query_pre_attn_scalar: PositiveFloat | None = None  # scores / its root; unset: head_dim
    attn_logit_softcap: PositiveFloat | None = None  # attention scores: cap * tanh(score / cap)
    final_logit_softcap: PositiveFloat | None = None  # logits: cap * tanh(logit / cap)
    scaled_embedding: bool = False  # multiply the embedding by the square root of embed (Gemma)
    tie_word_embeddings: bool = False  # the LM head is the transposed embedding
    unit_norm_head: bool = False  # divide the LM head's weights of a token by their norm
    fused_gate_up: bool = False  # gate and up projection are one array and one product
    latent_attention: LatentAttention | None = None  # multi-head latent attention (DeepSeek)
    moe: MixtureOfExperts | None = None  # mixture of experts; unset: a dense model
    mtp_loss_weight: NotNegativeFloat | None = None  # of predicting the token after the next
    dropout: DropoutRate = 0.0  # after embedding, attention and MLP
    init_std: PositiveFloat = 0.02  # of initial weights; of a block's outputs: / sqrt(2 layers)
    dtype: ComputeDtype = "bfloat16"  # older name of program.precision.compute
    remat: Remat = "dots"  # activation checkpointing: what to recompute; docs/guides/sharding.md
    # auto: backward pass in blocks of hidden columns on GPUs and TPUs, if remat = "full" and these
    # save much memory for little time. none: all columns at once.
    mlp_blocks: Literal["auto", "none"] = "auto"  # auto: MLPs in blocks; docs/guides/sharding.md
    attention: AttentionImplementation = "auto"  # flash never stores scores; docs/guides/targets.md
    unroll: Positive = 1  # layers in an iteration of the loop over layers; docs/BENCHMARKS.md

    @property
    def vocab_tokens(self) -> int:
        """Number of rows of the embedding that stand for a token."""
        return self.vocab - (self.vocab_padding or 0)

    @property
    def dense_layers(self) -> int:
        """Number of layers before `layers` that have an MLP although the others are mixtures."""
        return self.moe.dense_layers if self.moe else 0

    @property
    def depth(self) -> int:
        """Number of all transformer blocks."""
        return self.dense_layers + self.layers

    @property
    def ahead_layers(self) -> int:
        """Number of blocks of multi-token prediction, which only training computes."""
        return 0 if self.mtp_loss_weight is None else 1

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that rotary positions rotate."""
        assert self.head_dim
        if self.latent_attention is not None:
            return self.latent_attention.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    def __post_init__(self) -> None:
        if self.vocab_tokens < 1:
            raise ValueError(
                f"vocab_padding = {self.vocab_padding} is not below vocab = {self.vocab}"
            )
        self._set_head_sizes()
        self._check_activation()
        self._check_positions()

    def _set_head_sizes(self) -> None:
        if self.head_dim is None and self.embed % self.heads:
            raise ValueError(
                f"embed = {self.embed} is not a multiple of heads = {self.heads}; "
                "change one, or set head_dim"
            )
        set_derived_defaults(self, kv_heads=self.heads, head_dim=self.embed // self.heads)
        assert self.kv_heads and self.head_dim
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}"
            )
        if self.positions == "rope":
            self._check_rotary_dim()

        if self.latent_attention is not None:
            self._check_latent_attention(self.latent_attention)

    def _check_latent_attention(self, latent: LatentAttention) -> None:
        refused = {
            "kv_heads": self.kv_heads != self.heads,
            "bias": self.bias != "none",
            "qk_norm": self.qk_norm,
            "positions": self.positions != "rope",
            "partial_rotary_factor": self.partial_rotary_factor != 1,
            "sliding_window": self.sliding_window is not None,
        }
        if names := [name for name, is_set in refused.items() if is_set]:
            raise ValueError(f"latent_attention cannot be used with {', '.join(names)}; remove it")
        if latent.qk_rope_head_dim >= (self.head_dim or 0):
            raise ValueError(
                f"latent_attention.qk_rope_head_dim = {latent.qk_rope_head_dim} is not below "
                f"head_dim = {self.head_dim}, the width of queries and keys"
            )

    def _check_rotary_dim(self) -> None:
        if self.latent_attention is not None and self.rotary_dim % 2:
            raise ValueError(
                f"latent_attention.qk_rope_head_dim = {self.rotary_dim} is odd; rotary positions "
                "rotate pairs of dimensions"
            )
        if self.partial_rotary_factor == 1 and self.rotary_dim % 2:
            raise ValueError(
                f"head_dim = {self.head_dim} is odd; rotary positions rotate pairs of dimensions"
            )
        if self.rotary_dim == 0 or self.rotary_dim % 2:
            raise ValueError(
                f"partial_rotary_factor = {self.partial_rotary_factor} rotates {self.rotary_dim} "
                f"of head_dim = {self.head_dim} dimensions; choose one that rotates an even number"
            )

    def _check_activation(self) -> None:
        if self.fused_gate_up and self.activation in ("gelu", "gelu_tanh"):
            raise ValueError(
                f'activation = "{self.activation}" has no gate to fuse; set fused_gate_up = false'
            )
        if self.moe is not None and self.fused_gate_up:
            raise ValueError(
                "fused_gate_up is only for dense models; set fused_gate_up = false for moe"
            )
        if self.dense_layers and self.global_attention_every is not None:
            raise ValueError(
                "moe.dense_layers cannot be used with global_attention_every; remove one"
            )

    def _check_positions(self) -> None:
        if self.positions == "learned" and self.max_position_embeddings is None:
            raise ValueError('positions = "learned" needs max_position_embeddings')
        if self.positions != "learned" and self.max_position_embeddings is not None:
            raise ValueError('max_position_embeddings is only for positions = "learned"; remove it')
        if self.positions != "rope" and self.rope_scaling is not None:
            raise ValueError('rope_scaling is only for positions = "rope"; remove it')
        if self.positions != "rope" and self.partial_rotary_factor != 1:
            raise ValueError('partial_rotary_factor is only for positions = "rope"; remove it')
        for name in ("short_factor", "long_factor"):
            divisors = getattr(self.rope_scaling, name, None)
            if divisors is not None and 2 * len(divisors) != self.rotary_dim:
                raise ValueError(
                    f"rope_scaling.{name} has {len(divisors)} numbers; head_dim = {self.head_dim} "
                    f"needs {self.rotary_dim // 2}, one for each pair of rotated dimensions"
                )
        for name in ("global_attention_every", "sliding_window_rope_theta"):
            if self.sliding_window is None and getattr(self, name) is not None:
                raise ValueError(f"{name} needs sliding_window; set sliding_window too")
