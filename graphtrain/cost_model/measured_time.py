"""Time of a compiled step on a CPU: the work of its instructions, by a profile of the machine.

The virtual devices of a CPU share its cores. Processor time is the sum over all devices; the clock
shows what the busiest resource takes: all cores, where devices or threads keep all of them busy.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphtrain.cost_model.machine_profile import (
    CACHED_BYTES,
    MachineProfile,
    MeasuredCollective,
    MeasuredProduct,
)
from lowering.hlo.loop_work import UNMEASURED

if TYPE_CHECKING:
    from lowering.hlo.collectives import Collective
    from lowering.hlo.loop_work import LoopWork
    from lowering.hlo.work import Product, ProgramWork

_NEAREST = 4  # measured products whose rates are averaged


class MissingKind(LookupError):
    """A profile lacks a kind of loops, which `graphtrain doctor --measure` would measure."""


@dataclass(frozen=True)
class PartSeconds:
    """Seconds of one part of a step."""

    processor: float = 0.0  # of all cores, for all devices
    clock: float = 0.0

    def __add__(self, other: PartSeconds) -> PartSeconds:
        return PartSeconds(self.processor + other.processor, self.clock + other.clock)


@dataclass(frozen=True)
class MeasuredTime:
    """Seconds of a step by part, from measured numbers."""

    source: str  # where the profile's numbers are from
    products: PartSeconds
    loops: PartSeconds  # between products: memory and functions of elements
    overheads: PartSeconds  # starting the step, its operations and iterations
    communication: dict[str, PartSeconds] = field(default_factory=dict)  # by mesh axes

    @property
    def total(self) -> PartSeconds:
        """Seconds of the whole step."""
        parts = self.products, self.loops, self.overheads, *self.communication.values()
        return sum(parts, PartSeconds())


def measured_time(
    work: ProgramWork, collectives: Iterable[Collective], profile: MachineProfile, devices: int
) -> MeasuredTime:
    """Return the time of a compiled step.

    Args:
        work: What one device computes, from the program's record.
        collectives: What the devices send, from the same record.
        profile: What was measured of the machine.
        devices: Number of virtual devices, which share the machine's cores.

    Raises:
        KeyError: the profile lacks a dtype in which the step multiplies.
        MissingKind: it lacks a kind of the step's loops.
    """
    share = CoreShare(devices, profile.cores)
    products = loops = PartSeconds()
    for product, count in work.products.items():
        products += share.of(count * product_seconds(product, profile), profile.cores)
    for loop, count in work.loops.items():
        threads = loop.partitions or profile.cores
        loops += share.of(count * loop_seconds(loop, profile), threads)
    cost = {name: one.seconds for name, one in profile.overheads.items()}
    starting = work.launches * cost["launch"] + work.iterations * cost["iteration"]
    once = cost["step"] + work.arrays * cost["array"]
    communication: dict[str, PartSeconds] = {}
    for one in collectives:
        axes = "+".join(one.axes)
        seconds = share.of(one.count * collective_seconds(one, profile), 1)
        communication[axes] = communication.get(axes, PartSeconds()) + seconds
    overheads = share.of(starting + once, 1)
    return MeasuredTime(profile.source, products, loops, overheads, communication)


@dataclass(frozen=True)
class CoreShare:
    """Devices that share cores."""

    devices: int
    cores: int

    def of(self, seconds: float, threads: int) -> PartSeconds:
        """Return the seconds of all devices for work that takes one device these seconds.

        Args:
            seconds: Processor time of one device.
            threads: Number of threads among which a device divides it.
        """
        everything = self.devices * seconds
        return PartSeconds(everything, everything / min(self.cores, self.devices * threads))


def product_seconds(product: Product, profile: MachineProfile) -> float:
    """Return the processor time of a product, at the mean rate of the most similar measured ones.

    Raises:
        KeyError: no product of this dtype was measured.
    """
    alike = [one for one in profile.products if one.dtype == product.dtype]
    if not alike:
        raise KeyError(product.dtype)
    nearest = sorted(alike, key=lambda one: _distance(product, one))[:_NEAREST]
    weights = [1 / (0.05 + _distance(product, one)) ** 2 for one in nearest]
    slowness = sum(
        weight * one.seconds / one.flops for weight, one in zip(weights, nearest, strict=True)
    )
    return product.flops * slowness / sum(weights)


def _distance(product: Product, other: MeasuredProduct) -> float:
    """Return how unlike two products are: the distance of the logarithms of their sizes."""
    pairs = (
        (product.rows, other.rows),
        (product.summed, other.summed),
        (product.columns, other.columns),
    )
    sizes = sum(math.log2(max(1, one) / two) ** 2 for one, two in pairs)
    batch = math.log2(max(1, product.batch) / other.batch) / 2
    return math.sqrt(sizes + batch**2)


def loop_seconds(loop: LoopWork, profile: MachineProfile) -> float:
    """Return the processor time of a loop: that of its memory or of its functions, the longer.

    Raises:
        MissingKind: the profile lacks a kind of the loop's functions.
        KeyError: no profile has the kind.
    """
    costs = {one.kind: one.seconds for one in profile.functions}
    for kind, _ in loop.elements:
        if kind.startswith(UNMEASURED):
            raise KeyError(kind)
        if kind not in costs:
            raise MissingKind(kind)
    functions = sum(count * costs[kind] for kind, count in loop.elements)
    return max(functions, loop.bytes * seconds_per_byte(loop.bytes, profile))


def seconds_per_byte(size: int, profile: MachineProfile) -> float:
    """Return the seconds of a byte in a loop that reads and writes `size` bytes.

    Raises:
        KeyError: no memory was measured.
    """
    points = sorted((one.bytes, one.seconds / one.bytes) for one in profile.memory)
    if not points:
        raise KeyError("streams of memory")
    if size > CACHED_BYTES:
        size = max(size, points[-1][0])
    return _interpolated([math.log2(at) for at, _ in points], [y for _, y in points], size)


def _interpolated(logarithms: Sequence[float], values: Sequence[float], size: int) -> float:
    """Interpolate between values at logarithms of sizes; outside, return the nearest value."""
    at = math.log2(max(1, size))
    after = bisect.bisect(logarithms, at)
    if after == 0 or after == len(logarithms):
        return values[min(after, len(values) - 1)]
    left, right = logarithms[after - 1], logarithms[after]
    share = (at - left) / (right - left)
    return values[after - 1] * (1 - share) + values[after] * share


def collective_seconds(collective: Collective, profile: MachineProfile) -> float:
    """Return the processor time of one device in one execution of a collective.

    Between measured sizes it is linear in the bytes. An unmeasured number of devices is taken as
    the nearest one.

    Raises:
        KeyError: the operation was not measured.
    """
    of_op = [one for one in profile.collectives if one.op == collective.op]
    if not of_op:
        raise KeyError(collective.op)
    near = min({one.devices for one in of_op}, key=lambda one: abs(one - collective.devices))
    points = sorted((one for one in of_op if one.devices == near), key=lambda one: one.bytes)
    return _linear(points, collective.bytes)


def _linear(points: Sequence[MeasuredCollective], size: int) -> float:
    """Return the seconds of a size on the lines through the measured ones."""
    after = bisect.bisect([one.bytes for one in points], size)
    if after == 0:
        return points[0].seconds
    left = points[min(after, len(points) - 1) - 1] if len(points) > 1 else points[0]
    right = points[min(after, len(points) - 1)]
    if right.bytes == left.bytes:
        return left.seconds
    slope = (right.seconds - left.seconds) / (right.bytes - left.bytes)
    return max(left.seconds + slope * (size - left.bytes), 0.0)
