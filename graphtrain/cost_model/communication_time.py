"""Time of a program's collectives on the networks of a machine, in seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lowering.machine.target import Target
from sharding_rules.mesh import MeshShape

if TYPE_CHECKING:
    from lowering.hlo.collectives import Collective

# Seconds to start one collective: assumed, the order of a kernel launch and a handshake.
_LATENCY = 5e-6


def communication_seconds(
    collectives: Iterable[Collective], mesh: MeshShape, target: Target
) -> dict[str, float | None]:
    """Return the seconds of communication by mesh axes; None where the bandwidth is unknown."""
    seconds: dict[str, float | None] = {}
    speeds: dict[tuple[str, tuple[str, ...], int, str], float] = {}
    for collective in collectives:
        axes = "+".join(collective.axes)
        group = collective.op, collective.axes, collective.devices, collective.network
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
    across slices; a predicted one is whole. Sums and gathers pass through all devices of a group,
    in rings whose neighbors are mostly on one host. In an all-to-all each device has something else
    for each other one, and most of it crosses hosts or several links of a torus.
    """
    is_part = target.slices > 1 and collective.devices < mesh.size(collective.axes)
    if collective.network == "dcn":
        return target.specification.get("network", 0.0) / 2
    is_to_all = collective.op == "all-to-all"
    if is_part and "link" in target.specification:
        of_torus = _all_to_all_of_torus if is_to_all else _bandwidth_of_torus
        return of_torus(collective.devices, target)
    speed = bandwidth_of(collective.axes, mesh, target)
    if not speed:
        return 0.0
    if target.platform == "tpu":
        return _all_to_all_of_slices(collective.axes, mesh, target) if is_to_all else speed
    if not crosses_hosts(collective.axes, mesh, target):
        return speed
    one_way, network = (target.specification[name] / 2 for name in ("link", "network"))
    if collective.op == "collective-permute" and target.platform != "neuron":
        # The last device of a host sends to the next host alone. All devices of an instance share
        # its EFA; GPUs and NPUs have a port each.
        return min(one_way, network)
    if not is_to_all:
        return speed
    members = _members_per_host(collective.axes, mesh, target.linked_devices or 1)
    return _to_all(mesh.size(collective.axes), members, one_way, network)


def _to_all(devices: int, members: int, inside: float, outside: float) -> float:
    """Return the bytes per second of an all-to-all whose groups share hosts or slices.

    Args:
        devices: In a group.
        members: Of a group that share a host or slice.
        inside: Bytes per second to these; of one device.
        outside: Bytes per second to the others; of one device.
    """
    others = devices - 1
    to_others = outside * others / (devices - members)
    return to_others if members == 1 else min(to_others, inside * others / (members - 1))


def _all_to_all_of_slices(axes: tuple[str, ...], mesh: MeshShape, target: Target) -> float:
    """Return the bytes per second of a TPU in an all-to-all along mesh axes."""
    devices, slices = mesh.size(axes), _slices(axes, mesh, target)
    members = devices // slices
    inside = _all_to_all_of_torus(members, target)
    if slices == 1:
        return inside
    return _to_all(devices, members, inside, target.specification.get("network", 0.0) / 2)


def _all_to_all_of_torus(members: int, target: Target) -> float:
    """Return the bytes per second of a TPU in an all-to-all with members of its slice.

    In a dimension with n chips, what a chip sends passes n / 4 links on average, both ways round.

    Source: Austin et al. 2025, "How to scale your model", https://jax-ml.github.io/scaling-book
    """
    of_dimension = target.specification["link"] / 2 / len(target.topology)
    longest = max(_spanned(members, target), default=2)
    return of_dimension * (members - 1) / members * 4 / longest if members > 1 else of_dimension


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
    slices = _slices(axes, mesh, target)
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


def _slices(axes: tuple[str, ...], mesh: MeshShape, target: Target) -> int:
    """Return the number of slices that a group along mesh axes is on."""
    across = mesh.across(target.slices)
    return math.prod(across.get(axis, 1) for axis in axes)


def _dimensions(group: int, target: Target) -> int:
    """Return how many dimensions of a torus a group of devices spans."""
    return max(1, len(_spanned(group, target)))


def _spanned(group: int, target: Target) -> list[int]:
    """Return in how many chips of each dimension a group of devices is, the longest ones first."""
    chips, lengths = group / target.specification.get("devices_per_chip", 1), []
    for size in sorted(target.topology, reverse=True):
        if chips <= 1:
            break
        lengths.append(min(size, math.ceil(chips)))
        chips /= size
    return lengths


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
