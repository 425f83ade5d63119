"""Time of a training step, in seconds: compute, memory, communication, bubble, host memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.assessment import Memory, StepTime
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
from lowering.machine.target import AT_PEAK, Achieved, Target
from sharding_rules.mesh import MeshShape

if TYPE_CHECKING:
    from lowering.hlo.collectives import Collective

# Mesh axes whose communication overlaps with compute: gradients and gathered weights are sent while
# other layers compute, keys and values of a ring while its blocks do.
OVERLAPPED_AXES = {"data", "fsdp", "context"}
# Seconds to start one collective: assumed, the order of a kernel launch and a handshake.
_LATENCY = 5e-6


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
    moved = moved_bytes(program, memory, flash, weights)
    bandwidth = target.specification.get("bandwidth")
    # Collectives are counted in the bubble's ticks too. Without a known compute time, their share
    # is what is known of the bubble: else a pipeline would look free.
    between_products = elementwise_bytes(program, flash) / bandwidth if bandwidth else 0.0
    in_ticks = exposed if compute is None else compute + between_products
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
    state = memory.parameters + memory.optimizer + all_gradients(program, weights)
    return 2 * state + elementwise_bytes(program, flash)


def communication_seconds(
    collectives: Iterable[Collective], mesh: MeshShape, target: Target
) -> dict[str, float | None]:
    """Return the seconds of communication by mesh axes; None where the bandwidth is unknown."""
    seconds: dict[str, float | None] = {}
    speeds: dict[tuple[tuple[str, ...], int, str], float] = {}
    for collective in collectives:
        axes = "+".join(collective.axes)
        group = collective.axes, collective.devices, collective.network
        speed = speeds.get(group)
        if speed is None:
            speed = speeds[group] = speed_of(collective, mesh, target)
        if not speed:
            seconds[axes] = None
            continue
        travel = collective.wire_bytes_per_step / speed
        seconds[axes] = (seconds.get(axes) or 0.0) + travel + collective.count * _LATENCY
    return seconds


def speed_of(collective: Collective, mesh: MeshShape, target: Target) -> float:
    """Return the bytes per second that a device sends in a collective; 0.0 if unknown.

    A compiled program for several slices has the parts of a collective, inside of a slice and
    across slices; a predicted one is whole.
    """
    is_part = target.slices > 1 and collective.devices < mesh.size(collective.axes)
    if collective.network == "dcn":
        return target.specification.get("network", 0.0) / 2
    if is_part and "link" in target.specification:
        return _bandwidth_of_torus(collective.devices, target)
    return bandwidth_of(collective.axes, mesh, target)


def bandwidth_of(axes: tuple[str, ...], mesh: MeshShape, target: Target) -> float:
    """Return the bytes per second that a device sends along mesh axes; 0.0 if unknown.

    GPUs of one host use its link. Between hosts, the members of a group that share a host use their
    network ports together. On a torus a group has the links of the dimensions that it spans;
    between slices, the members of a group that share a slice use their parts of the DCN together.
    """
    specification, linked = target.specification, target.linked_devices
    if "link" not in specification or not axes:
        return 0.0
    one_way = specification["link"] / 2
    if target.platform == "tpu":
        return _bandwidth_of_slices(axes, mesh, target)
    if not crosses_hosts(axes, mesh, target):
        return one_way
    if "network" not in specification or linked is None:
        return 0.0
    return min(one_way, _members_per_host(axes, mesh, linked) * specification["network"] / 2)


def _bandwidth_of_slices(axes: tuple[str, ...], mesh: MeshShape, target: Target) -> float:
    """Return the bytes per second of a TPU along mesh axes, inside of its slice and across slices.

    Collectives are hierarchical: a sum is scattered inside of each slice, reduced across slices,
    where each member of a slice sends its share, and gathered again. The slower of the two networks
    decides.
    """
    specification = target.specification
    across = mesh.across(target.slices)
    slices = math.prod(across.get(axis, 1) for axis in axes)
    members = mesh.size(axes) // slices
    inside = _bandwidth_of_torus(members, target)
    if slices == 1:
        return inside
    if "network" not in specification:
        return 0.0
    shared = members * specification["network"] / 2
    return shared if members == 1 else min(inside, shared)


def _bandwidth_of_torus(members: int, target: Target) -> float:
    """Return the bytes per second of a TPU in a group of members of its slice."""
    one_way = target.specification["link"] / 2
    return one_way * _dimensions(members, target) / len(target.topology)


def _dimensions(group: int, target: Target) -> int:
    """Return how many dimensions of a torus a group of devices spans, the longest ones first."""
    chips = group / target.specification.get("devices_per_chip", 1)
    spanned = 0
    for size in sorted(target.topology, reverse=True):
        if chips <= 1:
            break
        chips, spanned = chips / size, spanned + 1
    return max(1, spanned)


def crosses_hosts(axes: tuple[str, ...], mesh: MeshShape, target: Target) -> bool:
    """Return whether groups along mesh axes leave the devices of a link; never in a TPU slice."""
    if target.linked_devices is None:
        return False
    names = list(mesh.axes)
    slowest = min(names.index(name) for name in axes)
    return mesh.size(tuple(names[slowest:])) > target.linked_devices


def _members_per_host(axes: tuple[str, ...], mesh: MeshShape, host: int) -> int:
    """Return how many members of a group share a host, which holds consecutive mesh positions."""
    stride, members = 1, 1
    for name, size in reversed(list(mesh.axes.items())):
        if stride >= host:
            break
        local_size = min(size, host // stride)
        members *= local_size if name in axes else 1
        stride *= size
    return members
