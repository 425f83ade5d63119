"""Causal attention for CPUs, one block of queries at a time.

A block of queries attends to the keys up to its own end, so that most of what the causal mask hides
is not computed. No scores are saved for the backward pass, which recomputes them from the
log-sum-exp of each row.

Inside, queries are (batch, kv_heads, query, group, head_dim), keys and values (batch, kv_heads,
key, head_dim). The large operands of every product are laid out as XLA:CPU's matrix units read
them: XLA:CPU converts operands that it has to transpose to float32.

Source: Dao et al. 2022, "FlashAttention", appendix B, https://arxiv.org/abs/2205.14135
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from graphtrain.models.attention.kernel_support import query_blocks
from graphtrain.models.attention.score_mods import (
    ScoreTransform,
    score_derivative,
    transform_scores,
)
from graphtrain.models.attention.segment_mask import Masks, mask_pairs, segment_ids
from graphtrain.models.attention.sinks import add_sinks, by_group, sink_gradients
from graphtrain.models.matmul import dot
from lowering.tracing.cpu_hints import cast_round_to_even, materialize

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float


class Residuals(NamedTuple):
    """Values that the forward pass saves for the backward pass."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    mixed: jax.Array  # attention output (batch, seq, heads, head_dim)
    log_sum: jax.Array  # log-sum-exp of each row of scores (batch, kv_heads, query, group)
    sinks: jax.Array | None  # logits of attention sinks (heads,), which log_sum includes
    hiding: Masks


def blockwise_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    scoring: ScoreTransform,
    window: jax.Array | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch seq heads value_dim"]:
    """Compute `dot_product_attention` of sequences that start at position 0.

    `window` is the sliding window in positions; without it, a query sees all earlier keys. `sinks`
    are the logits of each query head's attention sink; without them, there are none.
    """

    @jax.custom_vjp
    def attend(
        query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array | None, masks: Masks
    ) -> jax.Array:
        return forward(query, key, value, sinks, masks)[0]

    def forward(
        query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array | None, masks: Masks
    ) -> tuple[jax.Array, Residuals]:
        queries, keys, values = _fold(query, key.shape[2]), _fold_keys(key), _fold_keys(value)
        output, log_sum = _attend(queries, keys, values, scoring, masks)
        if sinks is not None:
            output, log_sum = add_sinks(output, log_sum, by_group(sinks, key.shape[2]))
        out = _unfold(output.astype(query.dtype))
        return out, Residuals(queries, keys, values, out, log_sum, sinks, masks)

    def backward(residuals: Residuals, gradient: jax.Array) -> tuple[Any, ...]:
        return *_gradients(residuals, gradient, scoring), None

    attend.defvjp(forward, backward)
    return attend(query, key, value, sinks, Masks(window, segment_ids()))


def _attend(
    query: jax.Array, key: jax.Array, value: jax.Array, scoring: ScoreTransform, masks: Masks
) -> tuple[jax.Array, jax.Array]:
    """Return the float32 attention output and the log-sum-exp of each row of scores."""
    outputs, log_sums = [], []
    for rows, keys in _blocks(query.shape[2]):
        _, scores = _scores(query, key, rows, keys, scoring, masks)
        highest = scores.max(-1)
        # Sum the probabilities as rounded for the product.
        probs = materialize(cast_round_to_even(jnp.exp(scores - highest[..., None]), value.dtype))
        total = probs.astype(jnp.float32).sum(-1)
        weighted_values = dot("bhqgk,bhkd->bhqgd", probs, value[:, :, keys], jnp.float32)
        outputs.append(weighted_values / total[..., None])
        log_sums.append(highest + jnp.log(total))
    return jnp.concatenate(outputs, 2), jnp.concatenate(log_sums, 2)


def _gradients(
    residuals: Residuals, gradient: jax.Array, scoring: ScoreTransform
) -> tuple[jax.Array | None, ...]:
    """Return the gradients of queries, keys, values and sinks, in the model's shapes."""
    query, key, value, output, log_sum, sinks, masks = residuals
    dtype, length = query.dtype, query.shape[2]
    products = gradient.astype(jnp.float32) * output.astype(jnp.float32)
    mean = _fold(products.sum(-1, keepdims=True), key.shape[1])[..., 0]
    gradient = _fold(gradient, key.shape[1])
    transposed = [jnp.moveaxis(x, -1, 2) for x in (query, gradient)]  # head_dim before positions
    log_sum, mean, gradient, transposed = materialize((log_sum, mean, gradient, transposed))
    grad_query, grad_key, grad_value = [], 0.0, 0.0
    for rows, keys in _blocks(length):
        products, scores = _scores(query, key, rows, keys, scoring, masks)
        probs = materialize(
            cast_round_to_even(jnp.exp(scores - log_sum[:, :, rows, :, None]), dtype)
        )
        grad_probs = dot("bhqgd,bhkd->bhqgk", gradient[:, :, rows], value[:, :, keys], jnp.float32)
        derivative = score_derivative(products, scoring)
        grad_products = probs * (grad_probs - mean[:, :, rows, :, None]) * derivative
        grad_products = materialize(cast_round_to_even(grad_products, dtype))
        grad_query.append(dot("bhqgk,bhkd->bhqgd", grad_products, key[:, :, keys]))
        queries, gradients = (x[:, :, :, rows] for x in transposed)
        padding = (*[(0, 0)] * 3, (0, length - keys.stop))
        grad_key += jnp.pad(dot("bhdqg,bhqgk->bhdk", queries, grad_products, jnp.float32), padding)
        grad_value += jnp.pad(dot("bhdqg,bhqgk->bhdk", gradients, probs, jnp.float32), padding)
    grad_key, grad_value = (
        jnp.moveaxis(jnp.asarray(x).astype(dtype), 3, 1) for x in (grad_key, grad_value)
    )
    # The backward pass of the rotary embedding comes next, and reads each element twice.
    grads = materialize((_unfold(jnp.concatenate(grad_query, 2)), grad_key, grad_value))
    if sinks is None:
        return (*grads, None)
    by_query = sink_gradients(log_sum, mean, by_group(sinks, key.shape[1]))
    return (*grads, by_query.sum((0, 2)).reshape(sinks.shape).astype(sinks.dtype))


def _scores(
    query: jax.Array,
    key: jax.Array,
    rows: slice,
    keys: slice,
    scoring: ScoreTransform,
    masks: Masks,
) -> tuple[jax.Array, jax.Array]:
    """Return float32 products and scores of a block of queries with the keys up to its end."""
    products = dot("bhqgd,bhkd->bhqgk", query[:, :, rows], key[:, :, keys], jnp.float32)
    queries = jnp.arange(rows.start, rows.stop)
    distance = queries[:, None, None] - jnp.arange(keys.stop)
    scores = transform_scores(products, distance, scoring, masks.window)
    if (documents := masks.documents) is not None:
        scores = mask_pairs(scores, documents[:, rows], documents[:, keys])
    return products, scores


def _blocks(length: int) -> Iterator[tuple[slice, slice]]:
    """Yield the queries of each block, and the keys that they may see, as slices of positions."""
    count = query_blocks(length)
    ends = [length * (index + 1) // count for index in range(count)]
    for begin, end in zip([0, *ends], ends, strict=False):
        yield slice(begin, end), slice(0, end)


def _fold(x: jax.Array, kv_heads: int) -> jax.Array:
    """Reshape (batch, seq, heads, head_dim) to (batch, kv_heads, query, group, head_dim)."""
    batch, length, heads, head_dim = x.shape
    return x.reshape(batch, length, kv_heads, heads // kv_heads, head_dim).swapaxes(1, 2)


def _unfold(x: jax.Array) -> jax.Array:
    """Undo _fold."""
    batch, kv_heads, length, group, head_dim = x.shape
    return x.swapaxes(1, 2).reshape(batch, length, kv_heads * group, head_dim)


def _fold_keys(x: jax.Array) -> jax.Array:
    """Transpose (batch, seq, kv_heads, head_dim) to (batch, kv_heads, key, head_dim)."""
    return x.swapaxes(1, 2)
