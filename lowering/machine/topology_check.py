"""Checks that a topology of a machine exists; messages say what to write in its place."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

CHIPS_PER_HOST = 4  # on a TPU
_CUBE = 4  # chips along each dimension of the blocks that large slices of a 3D torus consist of


def problem_of_number(
    machine: str, devices: int, table: Mapping[str, Any], per_host: int, *, is_gpu: bool
) -> str:
    """Return why a machine has no complete hosts with a number of devices; empty if it has."""
    if not per_host or devices <= per_host or devices % per_host == 0:
        return ""
    hosts, each = _hosts(devices, per_host)
    other = f", or write hosts x devices of each, as in {machine}:{hosts}x{each}" * is_gpu
    return (
        f"{machine} has {per_host} devices on each host{_link(table, per_host)}; use a multiple of "
        f"{per_host} devices{other}"
    )


def _hosts(devices: int, per_host: int) -> tuple[int, int]:
    """Return the fewest hosts, and devices of each, that are a number of devices.

    A number that several devices of each host cannot make is rounded down.
    """
    for each in range(per_host, 1, -1):
        if devices % each == 0:
            return devices // each, each
    hosts = math.ceil(devices / per_host)
    return hosts, devices // hosts


def problem_of_hosts(
    machine: str, sizes: Sequence[int], table: Mapping[str, Any], per_host: int
) -> str:
    """Return why GPUs are not on hosts x devices of each; empty if they can be."""
    hosts, devices = sizes
    if devices <= per_host:
        return ""
    if table["group"] > per_host:
        return (
            f"{machine} has {per_host} devices on each host{_link(table, per_host)}; write "
            f"{machine}:{math.ceil(hosts * devices / per_host)}x{per_host}"
        )
    return f"the link of {machine} connects at most {per_host} devices, those of a host"


def _link(table: Mapping[str, Any], per_host: int) -> str:
    """Say how many devices the link connects, where these are several hosts."""
    group = table.get("group", 0)
    return f"; its link connects {group} devices" if group > per_host else ""


def problem_of_slice(machine: str, sizes: Sequence[int], table: Mapping[str, Any]) -> str:
    """Return why there is no TPU slice of this shape; empty if there is."""
    shapes, largest = table["shapes"], table["slice"]
    dimensions, chips = len(shapes[0].split("x")), math.prod(sizes)
    if len(sizes) != dimensions:
        return (
            f"{machine} is a torus of {dimensions} dimensions; write chips as in "
            f"{machine}:{shapes[0]}, and several slices as in 2x{machine}:{shapes[0]}"
        )
    if chips > largest:
        return (
            f"a slice of {machine} has at most {largest} chips; write several slices as in "
            f"2x{machine}:{shapes[-1]}"
        )
    if chips < CHIPS_PER_HOST or "x".join(map(str, sizes)) in shapes or _is_of_cubes(sizes):
        return ""
    ordered = sorted(sizes)
    existing = "x".join(map(str, ordered))
    if ordered != [*sizes] and not problem_of_slice(machine, ordered, table):
        return f"sizes of a slice ascend; write {machine}:{existing}"
    more = ""
    if dimensions == 3:
        more = f", and larger ones whose sizes are multiples of {_CUBE}, as in {machine}:4x4x12"
    return (
        f"{machine} has no slice of {'x'.join(map(str, sizes))}; it has {', '.join(shapes)}{more}"
    )


def _is_of_cubes(sizes: Sequence[int]) -> bool:
    """Return whether a slice of a 3D torus consists of whole cubes, and its sizes ascend."""
    return len(sizes) == 3 and not any(size % _CUBE for size in sizes) and [*sizes] == sorted(sizes)
