"""Time of a training step, in seconds: compute, memory, communication, bubble, host memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.assessment import Memory, StepTime
from graphtrain.cost_model.communication_time import communication_seconds
from graphtrain.cost_model.compute import expected_excess, flops_by_part
from graphtrain.cost_model.cool_down import seconds_beyond_ticks
from graphtrain.cost_model.elementwise import elementwise_bytes
from graphtrain.cost_model.exposed_reductions import exposed_reductions
from graphtrain.cost_model.host_transfers import exposed_seconds
from graphtrain.cost_model.memory import all_gradients
from graphtrain.cost_model.native_equivalent import with_native_model
from graphtrain.cost_model.product_peaks import part_peak, step_peak
from graphtrain.cost_model.tower import step_flops_of_tower, tower_of
from graphtrain.cost_model.weights import ShardedWeight
from graphtrain.models.flops import Part, step_flops_per_token
from lowering.machine.target import AT_PEAK, Achieved

if TYPE_CHECKING:
    from lowering.hlo.collectives import Collective

# Mesh axes whose communication overlaps with compute: gradients and gathered weights are sent while
# other layers compute, keys and values of a ring while its blocks do.
OVERLAPPED_AXES = {"data", "fsdp", "context"}


def step_time(
    program: ResolvedProgram,
    memory: Memory,
    collectives: Iterable[Collective],
    bubble: float = 0.0,
    achieved: Achieved | None = None,
    flash: bool = False,
    excess: float | None = None,
    weights: Sequence[ShardedWeight] | None = None,
) -> StepTime:
    """Estimate the time of a training step. What the machine's table lacks is None.

    Args:
        program: the program.
        memory: Memory of a device, from the compiler or an estimate.
        collectives: Read from a compiled program, or predicted.
        bubble: Fraction of a pipeline's ticks in which a stage is idle.
        achieved: Fractions of the machine's peak that programs reach. Default: the target's; the
            peak itself where none are known.
        flash: Whether attention is a kernel, which skips the masked half of its scores.
        excess: FLOPs over those that the model needs: compiled_excess() of a compiled step.
            Default: expected_excess(), by arithmetic.
        weights: Result of shard_weights, if the caller has it.
    """
    mesh, target = program.mesh, program.target
    known = achieved or target.achieved
    achieved = known or AT_PEAK
    expected = expected_excess(program, flash=flash)
    counted = expected if excess is None else max(excess, min(1.0, expected))
    parts = _seconds_by_part(program, achieved, flash, counted)
    compute = None if parts is None else sum(parts.values())
    collectives = tuple(collectives)
    seconds_of = partial(communication_seconds, mesh=mesh, target=target)
    communication = seconds_of(collectives)
    beside_compute = seconds_of(one for one in collectives if not one.exposed)
    waiting = {} if parts is None else exposed_reductions(program, parts, seconds_of, weights)
    hideable = hideable_seconds(beside_compute, achieved) - hideable_seconds(waiting, achieved)
    if parts is not None:
        hideable -= seconds_beyond_ticks(program, collectives, parts, seconds_of)
    hideable = max(0.0, hideable)
    exposed = sum(seconds or 0.0 for seconds in communication.values()) - hideable
    between_products = elementwise_bytes(program, flash)
    moved = _state_bytes(program, memory, weights) + between_products
    bandwidth = target.specification.get("bandwidth")
    # Collectives are counted in the bubble's ticks too. Without a known compute time, their share
    # is what is known of the bubble: else a pipeline would look free.
    reading = between_products / bandwidth if bandwidth else 0.0
    in_ticks = exposed if compute is None else compute + reading
    idle = in_ticks * bubble / (1 - bubble)
    return StepTime(
        compute=compute,
        memory=moved / bandwidth if bandwidth else None,
        communication=communication,
        bubble=idle,
        overlapped=None if compute is None else min(hideable, compute),
        host=exposed_seconds(program, compute),
        achieved=known,
    )


def mfu(program: ResolvedProgram, seconds: float | None, *, causal: bool = False) -> float | None:
    """Return the model FLOP utilization (MFU) of a step; recomputation is not useful work.

    The result is None if the time or the target's peak is not known. Products in 8 bits count at
    the peak of their dtype. Scores that a step never computes must not be counted as its work: MFU
    could exceed 1.

    Args:
        program: the program.
        seconds: Time of a step.
        causal: Count only the half of attention's scores that the causal mask leaves; required if
            attention is a kernel, which computes no others.

    Source: Chowdhery et al. 2022, "PaLM", appendix B, https://arxiv.org/abs/2204.02311
    """
    peak = step_peak(program)
    native, tower = with_native_model(program.settings), program.tower or tower_of(program.settings)
    useful = step_flops_per_token(native, causal=causal) * program.batch.tokens
    if tower is not None:
        useful += step_flops_of_tower(native, tower)
    return useful / (seconds * peak) if peak and seconds else None


def overlap_of(axes: Iterable[str], achieved: Achieved) -> float:
    """Return the fraction of the communication over mesh axes that overlaps with compute."""
    others = {*axes} - OVERLAPPED_AXES
    return 1.0 if not others else achieved.tensor_overlap if others == {"tensor"} else 0.0


def hideable_seconds(beside_compute: Mapping[str, float | None], achieved: Achieved) -> float:
    """Return how many seconds of communication overlap with compute, if it takes long enough.

    Args:
        beside_compute: communication_seconds() of the collectives that have compute beside them:
            all but sums of a pipeline without compute beside them.
        achieved: What the machine reaches, with its overlap of tensor parallelism.
    """
    return sum(
        (seconds or 0.0) * overlap_of(axes.split("+"), achieved)
        for axes, seconds in beside_compute.items()
    )


def _seconds_by_part(
    program: ResolvedProgram, achieved: Achieved, flash: bool, excess: float
) -> dict[Part, float] | None:
    """Return the seconds of products and attention; None if the peak FLOP/s is unknown.

    Args:
        program: The program.
        achieved: Fractions of the peak.
        flash: Whether attention is a kernel.
        excess: FLOPs over those that the model needs.
    """
    if not program.target.peak_flops(program.model.dtype):
        return None
    kernel = replace(achieved, products=achieved.attention) if flash else achieved
    return {
        part.name: excess
        * part.ideal
        / part_peak(program, part.name, kernel if part.name == "attention scores" else achieved)
        for part in flops_by_part(program, flash=flash)
    }


def moved_bytes(
    program: ResolvedProgram,
    memory: Memory,
    flash: bool,
    weights: Sequence[ShardedWeight] | None = None,
) -> float:
    """Return the bytes that a device reads and writes in a step outside of products.

    State and gradients are read and written once per step. Weights are read by the products, which
    takes less time than they compute unless a microbatch has few tokens.
    """
    return _state_bytes(program, memory, weights) + elementwise_bytes(program, flash)


def _state_bytes(
    program: ResolvedProgram, memory: Memory, weights: Sequence[ShardedWeight] | None
) -> float:
    """Return the bytes of state and gradients that a device reads and writes in a step."""
    return 2 * (memory.parameters + memory.optimizer + all_gradients(program, weights))
