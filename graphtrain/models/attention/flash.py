"""Causal attention by a flash attention kernel of the target, called on each device.

Scores exist for one block of queries and keys at a time, in on-chip memory. The output and the
log-sum-exp of each row of scores are saved for the backward pass, by every remat policy that saves
products with weights; the backward pass recomputes the scores. `models.kernels` decides whether
there is a kernel for a model and a target.

Source: Dao 2023, "FlashAttention-2", https://arxiv.org/abs/2307.08691
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from graphtrain.models.attention.kernel_residuals import name_residuals
from graphtrain.models.attention.kernel_support import BLOCK
from graphtrain.models.attention.score_mods import ScoreTransform
from graphtrain.models.attention.segment_mask import segment_ids
from graphtrain.models.projection import PROJECTION
from lowering.tracing.constrain import mesh_axes_of, on_each_device, placement, shards_of

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

_LARGEST_BLOCK = 512  # positions, on TPUs; MaxText's default, not tuned here
# Positions of queries and of keys in the backward pass on GPUs; not tuned here.
_BACKWARD_BLOCK = 64

# (queries, keys, values and, if documents are isolated, segment ids) -> output; on one device.
Kernel = Callable[..., jax.Array]


def flash_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    scoring: ScoreTransform,
    platform: str,
    window: int | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute `dot_product_attention` by the kernel of a platform.

    Compilers do not partition a kernel, so each device calls it for its own sequences and heads.

    Args:
        query: Queries.
        key: Keys; repeated for each query head where they are sharded differently from queries.
        value: Values; repeated as keys are.
        scoring: Transformation of query-key products into scores.
        platform: "tpu" or "cuda".
        window: Sliding window in positions; without it, a query sees all earlier keys.
    """
    context = placement()
    assert context is not None, "a kernel needs a mesh"
    kernel = {"tpu": tpu_kernel, "cuda": gpu_kernel}[platform](scoring, window)
    heads = (*mesh_axes_of("heads"), *mesh_axes_of("attention_heads"))
    if shards_of("kv_heads") * shards_of("attention_kv_heads") != context.shape.size(heads):
        key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], 2) for x in (key, value))
    split = PartitionSpec(mesh_axes_of("batch") or None, None, heads or None)
    documents = segment_ids()
    segment_inputs = () if documents is None else (documents,)
    by_batch = [PartitionSpec(mesh_axes_of("batch") or None) for _ in segment_inputs]
    local = on_each_device(kernel, (split, split, split, *by_batch), split)
    return local(query, key, value, *segment_inputs)


def tpu_kernel(scoring: ScoreTransform, window: int | None, interpret: bool = False) -> Kernel:
    """Return JAX's splash attention for TPUs, which skips blocks that the mask hides completely.

    `interpret` runs the kernel without a TPU, for tests.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    def attend(
        query: jax.Array, key: jax.Array, value: jax.Array, documents: jax.Array | None = None
    ) -> jax.Array:
        length, heads = query.shape[1:3]
        square = length, length
        mask = masks.CausalMask(square)
        if window is not None:
            mask = masks.LocalMask(square, (window - 1, 0), 0)
        block = next(size for size in range(_LARGEST_BLOCK, 0, -BLOCK) if length % size == 0)
        splash_kernel: Any = splash.make_splash_mha(
            masks.MultiHeadMask([mask] * heads),
            block_sizes=splash.BlockSizes(
                block_q=block,
                block_kv=block,
                block_q_dkv=block,
                block_kv_dkv=block,
                block_q_dq=block,
                block_kv_dq=block,
            ),
            attn_logits_soft_cap=scoring.cap,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
        kernel = name_residuals(jax.vmap(splash_kernel))
        scaled = (query.astype(jnp.float32) * scoring.scale).astype(query.dtype)
        arrays = [x.swapaxes(1, 2) for x in (scaled, key, value)]
        segments = None if documents is None else splash.SegmentIds(documents, documents)
        return kernel(*arrays, segments).swapaxes(1, 2)

    return attend


def gpu_kernel(scoring: ScoreTransform, window: int | None, interpret: bool = False) -> Kernel:
    """Return JAX's Triton attention for NVIDIA GPUs, which compiles without a GPU.

    The kernel requires as many key and value heads as query heads: they are repeated for the
    call, but saved for the backward pass without repetition. `interpret` runs the kernel without
    a GPU, for tests.
    """
    assert window is None and scoring.cap is None
    library = _triton()
    sizes = library.BlockSizes(
        block_q=BLOCK,
        block_k=BLOCK,
        block_q_dkv=_BACKWARD_BLOCK,
        block_kv_dkv=_BACKWARD_BLOCK,
        block_q_dq=_BACKWARD_BLOCK,
        block_kv_dq=_BACKWARD_BLOCK,
    )

    @jax.custom_vjp
    def attend(*arrays: jax.Array) -> jax.Array:
        return forward(*arrays)[0]

    def forward(
        query: jax.Array, key: jax.Array, value: jax.Array, documents: jax.Array | None = None
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        output, log_sum = library.mha(
            *_repeat_kv_heads(query, key, value),
            documents,
            sm_scale=scoring.scale,
            causal=True,
            block_sizes=sizes,
            interpret=interpret,
            return_residuals=True,
        )
        output, log_sum = checkpoint_name(output, PROJECTION), checkpoint_name(log_sum, PROJECTION)
        return output, (query, key, value, documents, output, log_sum)

    def backward(saved: tuple[Any, ...], gradient: jax.Array) -> tuple[Any, ...]:
        query, key, value, documents, output, log_sum = saved
        if query.shape[2] != key.shape[2]:
            # A barrier, or else XLA would repeat them once, and keep the repeated ones.
            key, value, gradient = jax.lax.optimization_barrier((key, value, gradient))
        residuals = (*_repeat_kv_heads(query, key, value), documents, output, log_sum)
        backward_options = "triton", None, 2, None, interpret, False, False
        grads = library.mha.bwd(scoring.scale, True, sizes, *backward_options, residuals, gradient)
        input_grads = grads[0], _sum_over_group(grads[1], key), _sum_over_group(grads[2], value)
        return input_grads if documents is None else (*input_grads, None)

    attend.defvjp(forward, backward)
    return attend


def _repeat_kv_heads(
    query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Repeat key and value heads, so that there is one for each query head."""
    repeat = partial(jnp.repeat, repeats=query.shape[2] // key.shape[2], axis=2)
    return query, repeat(key), repeat(value)


def _sum_over_group(gradient: jax.Array, like: jax.Array) -> jax.Array:
    """Sum the gradient over the repetitions of each head of `like`."""
    grouped = gradient.reshape(*like.shape[:3], -1, like.shape[3])
    return grouped.sum(3, dtype=jnp.float32).astype(like.dtype)


@cache
def _triton() -> Any:
    """Import JAX's Triton attention, without its warning (jax 0.11: it will move to tokamax)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention

    return attention
