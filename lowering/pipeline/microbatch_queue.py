"""Queue that moves microbatches to the first stage, and results back, around the ring of stages."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from lowering.pipeline.ring import Ring, read_slot, replace_slot


def exchange_with_queue(
    ring: Ring,
    virtual_stages: int,
    tick: jax.Array | int,
    x: jax.Array,
    queue: jax.Array,
    pass_on: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Replace the first stage's x by a new microbatch, at the ticks that begin its first chunk.

    At these ticks a column of the queue moves by one stage towards the first.

    Args:
        ring: The stages.
        virtual_stages: Chunks of each stage.
        tick: Tick of the forward passes, from 0. Results are put into the queue in later ticks too.
        x: What this stage received from the one before.
        queue: Microbatches that are stored on this stage, (M / S, ...).
        pass_on: Function that moves a column to the previous stage, with a result in place of the
            microbatch that the first stage took.

    Returns:
        The x of this tick, and the queue.
    """
    group, within = jnp.divmod(tick, ring.size * virtual_stages)
    column = (group * ring.size + within % ring.size) % len(queue)

    def exchange(x: jax.Array, queue: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = read_slot(queue, column)
        return jnp.where(ring.is_first, new, x), replace_slot(queue, column, pass_on(new))

    if virtual_stages == 1:
        return exchange(x, queue)
    return lax.cond(within < ring.size, exchange, lambda x, queue: (x, queue), x, queue)
