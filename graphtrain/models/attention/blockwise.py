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

from graphtrain.models.attention.score_mods import (
    ScoreTransform,
    score_derivative,
    transform_scores,
)
from graphtrain.models.attention.segment_mask import segment_ids
from graphtrain.models.matmul import dot
from lowering.tracing.cpu_hints import cast_round_to_even, materialize

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

_BLOCK = 128  # minimum queries per block, in sequences that have as many
_BLOCKS = 8  # maximum number of blocks; each is unrolled in the program


class Masks(NamedTuple):
    """Masks in addition to the causal mask."""

    window: jax.Array | None  # sliding window in positions, a scalar
    documents: jax.Array | None  # segment ids (batch, seq)


class Residuals(NamedTuple):
    """Values that the forward pass saves for the backward pass."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    mixed: jax.Array  # attention output (batch, seq, heads, head_dim)
    log_sum: jax.Array  # log-sum-exp of each row of scores (batch, kv_heads, query, group)
    hiding: Masks


def blockwise_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    scoring: ScoreTransform,
    window: jax.Array | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute `dot_product_attention` of sequences that start at position 0.

    `window` is the sliding window in positions; without it, a query sees all earlier keys.
    """

    @jax.custom_vjp
    def attend(query: jax.Array, key: jax.Array, value: jax.Array, hiding: Masks) -> jax.Array:
        return forward(query, key, value, hiding)[0]

    def forward(
        query: jax.Array, key: jax.Array, value: jax.Array, hiding: Masks
    ) -> tuple[jax.Array, Residuals]:
        queries, keys, values = _fold(query, key.shape[2]), _fold_keys(key), _fold_keys(value)
        mixed, log_sum = _attend(queries, keys, values, scoring, hiding)
        out = _unfold(mixed.astype(query.dtype))
        return out, Residuals(queries, keys, values, out, log_sum, hiding)

    def backward(kept: Residuals, gradient: jax.Array) -> tuple[Any, ...]:
        return *_gradients(kept, gradient, scoring), None

    attend.defvjp(forward, backward)
    return attend(query, key, value, Masks(window, segment_ids()))


def _attend(
    query: jax.Array, key: jax.Array, value: jax.Array, scoring: ScoreTransform, hiding: Masks
) -> tuple[jax.Array, jax.Array]:
    """Return the float32 attention output and the log-sum-exp of each row of scores."""
    mixed, log_sums = [], []
    for rows, keys in _blocks(query.shape[2]):
        _, scores = _scores(query, key, rows, keys, scoring, hiding)
        highest = scores.max(-1)
        # Sum the probabilities as rounded for the product.
        shares = materialize(cast_round_to_even(jnp.exp(scores - highest[..., None]), value.dtype))
        total = shares.astype(jnp.float32).sum(-1)
        of_values = dot("bhqgk,bhkd->bhqgd", shares, value[:, :, keys], jnp.float32)
        mixed.append(of_values / total[..., None])
        log_sums.append(highest + jnp.log(total))
    return jnp.concatenate(mixed, 2), jnp.concatenate(log_sums, 2)


def _gradients(
    kept: Residuals, gradient: jax.Array, scoring: ScoreTransform
) -> tuple[jax.Array, ...]:
    """Return the gradients of queries, keys and values, in the model's shapes."""
    query, key, value, mixed, log_sum, hiding = kept
    dtype, length = query.dtype, query.shape[2]
    products = gradient.astype(jnp.float32) * mixed.astype(jnp.float32)
    mean = _fold(products.sum(-1, keepdims=True), key.shape[1])[..., 0]
    gradient = _fold(gradient, key.shape[1])
    across = [jnp.moveaxis(x, -1, 2) for x in (query, gradient)]  # head_dim before positions
    log_sum, mean, gradient, across = materialize((log_sum, mean, gradient, across))
    of_query, of_key, of_value = [], 0.0, 0.0
    for rows, keys in _blocks(length):
        products, scores = _scores(query, key, rows, keys, scoring, hiding)
        shares = materialize(
            cast_round_to_even(jnp.exp(scores - log_sum[:, :, rows, :, None]), dtype)
        )
        of_shares = dot("bhqgd,bhkd->bhqgk", gradient[:, :, rows], value[:, :, keys], jnp.float32)
        steep = score_derivative(products, scoring)
        of_products = shares * (of_shares - mean[:, :, rows, :, None]) * steep
        of_products = materialize(cast_round_to_even(of_products, dtype))
        of_query.append(dot("bhqgk,bhkd->bhqgd", of_products, key[:, :, keys]))
        queries, gradients = (x[:, :, :, rows] for x in across)
        rest = (*[(0, 0)] * 3, (0, length - keys.stop))
        of_key += jnp.pad(dot("bhdqg,bhqgk->bhdk", queries, of_products, jnp.float32), rest)
        of_value += jnp.pad(dot("bhdqg,bhqgk->bhdk", gradients, shares, jnp.float32), rest)
    of_key, of_value = (
        jnp.moveaxis(jnp.asarray(x).astype(dtype), 3, 1) for x in (of_key, of_value)
    )
    # The backward pass of the rotary embedding comes next, and reads each element twice.
    return materialize((_unfold(jnp.concatenate(of_query, 2)), of_key, of_value))


def _scores(
    query: jax.Array,
    key: jax.Array,
    rows: slice,
    keys: slice,
    scoring: ScoreTransform,
    hiding: Masks,
) -> tuple[jax.Array, jax.Array]:
    """Return float32 products and scores of a block of queries with the keys up to its end."""
    products = dot("bhqgd,bhkd->bhqgk", query[:, :, rows], key[:, :, keys], jnp.float32)
    queries = jnp.arange(rows.start, rows.stop)
    distance = queries[:, None, None] - jnp.arange(keys.stop)
    scores = transform_scores(products, distance, scoring, hiding.window)
    if (found := hiding.documents) is not None:
        same = found[:, rows, None] == found[:, None, keys]
        scores = jnp.where(same[:, None, :, None, :], scores, -jnp.inf)
    return products, scores


def _blocks(length: int) -> Iterator[tuple[slice, slice]]:
    """Yield the queries of each block, and the keys that they may see, as slices of positions."""
    count = min(max(length // _BLOCK, 1), _BLOCKS)
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
