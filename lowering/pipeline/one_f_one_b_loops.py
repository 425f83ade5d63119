"""Loops of one device in 1F1B: forward passes, forward and backward passes, backward passes.

The stages exchange their results after every tick. If half of them ran a forward and the others a
backward pass, each tick would take as long as the slower of the two. So all stages run the same
kinds of passes in a tick: at first forward passes, then one of each kind, at last backward passes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lowering.pipeline.gradient_totals import GradientTotals, with_rows
from lowering.pipeline.one_f_one_b_device import Carry, DeviceWork
from lowering.pipeline.part_gradients import zero_gradients
from lowering.pipeline.schedule import PipelineLoss, mesh_axes_size
from lowering.pipeline.stored_inputs import StoredInputs
from lowering.tracing.cpu_hints import on_cpu
from lowering.tracing.recording import Recorded
from lowering.trees import Tree


def device_gradients(
    work: DeviceWork, queue: jax.Array
) -> tuple[PipelineLoss, Tree, jax.Array, Any]:
    """Return this device's terms of the value, the gradients, and the gradient of its queue.

    The gradients are totals over the copies of the weights, those of `last` also over the stages.
    Also the named activations of stages and `last`, and the gradients with respect to them, of all
    passes.

    Args:
        work: Passes of the device.
        queue: Embedded inputs of the microbatches that are stored on this stage, (M / S, ...).
    """
    ring, phases, x = work.ring, work.order.phases, jnp.zeros_like(queue[0])
    # With virtual stages, the queue moves one tick after a gradient has arrived.
    returned = (x,) if work.rounds == 1 else (x, x)
    zeros = {part: zero_gradients(weights.trained) for part, weights in work.parameters.items()}
    carry = Carry(x, returned, queue, StoredInputs.empty(ring, work.rounds, x), zeros)

    early_ticks, ticks, late_ticks = phases.ticks

    def forward_only(carry: Carry, tick: jax.Array) -> tuple[Carry, Any]:
        carry, _, reports = work.forward(tick, work.exchange(tick, early_ticks, carry))
        return carry, reports

    def both(carry: Carry, tick: jax.Array) -> tuple[Carry, Any]:
        carry, y, reports = work.forward(tick, work.exchange(tick, ticks, carry))
        sums = carry.gradients
        of_loss, of_last, scored = work.score(tick, y, sums["last"])
        if not on_cpu():
            # XLA would compute and reduce the gradient of the LM head after the layers' backward
            # pass, in which its operands, or the unsharded gradient, would wait.
            of_loss, of_last = lax.optimization_barrier((of_loss, of_last))
        carry = carry._replace(gradients={**sums, "last": of_last})
        carry, recorded = work.backward(tick, carry, of_loss)
        return carry, (reports, scored, recorded)

    carry, early = lax.scan(forward_only, carry, jnp.array(early_ticks))
    carry, (reports, scored, back) = lax.scan(both, carry, jnp.array(ticks))
    carry, late = _cool_down(work, carry, late_ticks)
    for tick in range(late_ticks.stop, late_ticks.stop + len(returned)):
        carry = work.exchange(tick, range(tick, tick + 1), carry)
        carry = carry._replace(returned=carry.returned[1:])
    # Before a gradient was put into the queue, the column of its microbatch has moved that often.
    moves = 2 * ring.size - 2 + len(returned)
    queue_gradient = jnp.roll(carry.queue, -moves, axis=0)
    of_stages, recorded = _joined(early, reports)
    scores, recorded_last, back_last = scored
    value = work.pipeline.total(scores, of_stages, mesh_axes_size(work.copies))
    both_ways = (recorded, recorded_last), (_joined(back, *late), back_last)
    return value, carry.gradients, queue_gradient, both_ways


def _cool_down(work: DeviceWork, carry: Carry, ticks: range) -> tuple[Carry, list[Recorded]]:
    """Run the backward passes after the last forward pass, and complete the gradients.

    Returns:
        The carry with the totals of the gradients, and what the ticks of each loop recorded.
    """
    # No backward pass below depends on the gradient of `last`.
    last = lax.psum(carry.gradients["last"], (work.ring.axis, *work.copies))
    carry = carry._replace(gradients={"stages": carry.gradients["stages"]})
    totals = GradientTotals.of(work.order, work.copies, carry.gradients["stages"])
    alone = range(ticks.start, totals.ticks.start)

    def backward(carry: Carry, tick: jax.Array) -> tuple[Carry, Recorded]:
        return work.backward(tick, work.exchange(tick, alone, carry))

    def with_totals(carry: Carry, tick: jax.Array) -> tuple[Carry, Recorded]:
        rows, first = totals.of_tick(carry.gradients["stages"], tick)
        carry, recorded = work.backward(tick, work.exchange(tick, totals.ticks, carry))
        stages = with_rows(carry.gradients["stages"], rows, first)
        return carry._replace(gradients={"stages": stages}), recorded

    carry, recorded = lax.scan(backward, carry, jnp.array(alone))
    late = [recorded]
    if totals.ticks:
        carry, recorded = lax.scan(with_totals, carry, jnp.array(totals.ticks))
        late.append(recorded)
    stages = totals.after_ticks(lax.optimization_barrier(carry.gradients["stages"]))
    return carry._replace(gradients={"stages": stages, "last": last}), late


def _joined(*parts: Tree) -> Tree:
    """Join what the ticks of several loops returned."""
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)
