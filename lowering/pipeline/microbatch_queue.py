"""Queue that moves microbatches to the first stage, and results back, around the ring of stages."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from lowering.pipeline.ring import Ring, read_slot, replace_slot
from lowering.tracing.control_flow import compute_in_turn


def exchange_with_queue(
    ring: Ring,
    virtual_stages: int,
    tick: jax.Array | int,
    ticks: range,
    x: jax.Array,
    queue: jax.Array,
    pass_on: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Replace the first stage's x by a new microbatch, at the ticks that begin its first chunk.

    At these ticks a column of the queue moves by one stage towards the first.

    Args:
        ring: The stages.
        virtual_stages: Chunks of each stage.
        tick: Tick of the step, from 0.
        ticks: All ticks of the loop that this one is in.
        x: What this stage received from the one before.
        queue: Microbatches that are stored on this stage, (M / S, ...).
        pass_on: Function that moves a column to the previous stage, with a result in place of the
            microbatch that the first stage took.

    Returns:
        The x of this tick, and the queue.
    """
    group, within = jnp.divmod(tick, ring.size * virtual_stages)
    column = (group * ring.size + within % ring.size) % len(queue)

    def exchange(both: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, queue = both
        new = read_slot(queue, column)
        return jnp.where(ring.is_first, new, x), replace_slot(queue, column, pass_on(new))

    if virtual_stages == 1:
        return exchange((x, queue))
    taken = sum(each % (ring.size * virtual_stages) < ring.size for each in ticks), len(ticks)
    return compute_in_turn(within < ring.size, exchange, lambda both: both, (x, queue), taken)
