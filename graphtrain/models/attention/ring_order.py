"""The order in which a step works on the positions of a sequence.

Where attention runs as a ring, each device holds two chunks of every sequence, one from either end:
of 2n chunks, device i of n holds i and 2n - 1 - i. A causal mask then leaves each the same work.
Tokens, targets and weights are put into that order once, at the beginning of a step; the sum of
losses does not depend on it, and whatever does depend on positions asks for them here.

Source: Brandon et al. 2023, "Striped attention", https://arxiv.org/abs/2311.09431, for the problem;
Grattafiori et al. 2024, "Llama 3", section 3.3.2, https://arxiv.org/abs/2407.21783, for this order
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from graphtrain.models.attention import kv_cache
from graphtrain.models.attention.segment_mask import places
from lowering.tracing.constrain import constrain, size_of, split_of
from lowering.trees import Tree
from sharding_rules.errors import ShardingError


def positions(length: int) -> jax.Array:
    """The position of every place of a sequence, int32 (length,).

    In its document, (batch, length), where these are kept apart.
    """
    if (of_documents := places()) is not None:
        return of_documents
    if (continued := kv_cache.places(length)) is not None:
        return continued
    devices = size_of("attended")
    if devices == 1:
        return jnp.arange(length)
    # ordered(arange), by arithmetic: each device finds its own, where a flip would have them sent.
    size, device = length // (2 * devices), jnp.arange(devices)[:, None]
    chunks = jnp.concatenate([device, 2 * devices - 1 - device], axis=1)
    return (size * chunks[..., None] + jnp.arange(size)).reshape(length)


def order_batch(batch: Tree) -> Tree:
    """Put a step's arrays (..., batch, seq) into the order in which it works on them."""
    if not split_of("attended"):
        return batch
    if "documents" in batch:
        raise ShardingError(
            'batch.documents = "apart" and attention in a ring (the rules context) do not go '
            "together; take rules that keep the keys of a sequence on one device"
        )
    return jax.tree.map(_order, batch)


def _order(x: jax.Array) -> jax.Array:
    axes = ("microbatch", "batch", "seq")[-x.ndim :]
    whole = constrain(x, *axes[:-1], None)  # integers: gathered sooner than exchanged
    return constrain(ordered(whole, x.ndim - 1), *axes)


def ordered(x: jax.Array, axis: int) -> jax.Array:
    """Put an axis of positions into the order of a step; without a ring it has that order.

    Raises:
        ShardingError: the positions do not divide into two chunks for each device of the ring.
    """
    devices = size_of("attended")
    if devices == 1:
        return x
    length = x.shape[axis]
    if length % (2 * devices):
        raise ShardingError(
            f"sequences of {length} positions do not divide into 2 chunks for each of the "
            f"{devices} devices along {' x '.join(split_of('attended'))}; lengths that would are "
            f"multiples of {2 * devices}"
        )
    ends = x.reshape(*x.shape[:axis], 2, devices, length // (2 * devices), *x.shape[axis + 1 :])
    first, last = (jax.lax.index_in_dim(ends, end, axis, keepdims=False) for end in (0, 1))
    return jnp.stack([first, jnp.flip(last, axis)], axis + 1).reshape(x.shape)
