"""Masking of the logits of rows that only pad the vocabulary."""

import jax
import jax.numpy as jnp

# The exponential of a logit this low is 0 in float32, and its square is finite, which the gradient
# of capped logits computes.
_MASKED_LOGIT = -1e9


def mask_padding(logits: jax.Array, tokens: int) -> jax.Array:
    """Return float32 logits (..., vocab) of which those from `tokens` on are never predicted.

    Their weights get no gradient. Each device masks its shard of the vocabulary.
    """
    if logits.shape[-1] == tokens:
        return logits
    vocab_ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(vocab_ids < tokens, logits, _MASKED_LOGIT)
