"""Attention sinks: a learned logit of each query head, whose softmax weight goes to no value.

A sink is a key whose value is zero. Attention without it, and the log-sum-exp of its scores, are
enough to add it afterwards. The backward passes of `blockwise` and `ring` need nothing else: the
gradient of a score depends on its probability, the output and the output's gradient.

Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", https://arxiv.org/abs/2508.10925;
Miller 2023, "Attention is off by one"
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def add_sinks(
    output: jax.Array, log_sum: jax.Array, sinks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return attention output and log-sum-exp with the sinks.

    Args:
        output: Attention without sinks (..., head_dim).
        log_sum: Log-sum-exp of its scores (...).
        sinks: Logits of the sinks, which broadcast to `log_sum`.
    """
    total = jnp.logaddexp(log_sum, sinks)
    return output * jnp.exp(log_sum - total)[..., None], total


def sink_gradients(log_sum: jax.Array, mean: jax.Array, sinks: jax.Array) -> jax.Array:
    """Return each query's gradient of the sinks, in the shape of `log_sum`.

    Args:
        log_sum: Log-sum-exp of the scores, sinks included.
        mean: Sum over head_dim of the output times its gradient, in the same shape.
        sinks: Logits of the sinks, which broadcast to `log_sum`.
    """
    return -jnp.exp(sinks - log_sum) * mean


def by_group(sinks: jax.Array, kv_heads: int) -> jax.Array:
    """Reshape sinks (heads,) to (kv_heads, 1, group), as scores have query heads and positions."""
    return sinks.astype(jnp.float32).reshape(kv_heads, 1, -1)
