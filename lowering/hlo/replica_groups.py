"""Parse the device groups of a collective operation, in every syntax used in HLO text.

Device ids are in mesh order, the last axis fastest, so an id determines the coordinate along every
mesh axis.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from sharding_rules.mesh import MeshShape

Groups = tuple[tuple[int, ...], ...]
SubAxis = tuple[str, int, int]  # axis, product of the sizes before the part, size of the part

_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=@?mesh\w*\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    r"(?:, device_ids=\(([\d,]+)\))?"
    r" *\{([^}]*)\}"
)
_LISTS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_BRACES = re.compile(r"\{([\d,]*)\}")
_AXIS_SIZE = re.compile(r"'([^']+)'=(\d+)")
_AXIS_USED = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def parse_groups(attributes: str, devices: int) -> Groups:
    """Return the groups of devices that communicate; for a collective-permute, source-target pairs.

    An operation without groups involves all devices.
    """
    if match := _MESH.search(attributes):
        return _of_mesh(*match.groups())
    if match := _IOTA.search(attributes):
        return _of_iota(*match.groups())
    if match := _LISTS.search(attributes) or _PAIRS.search(attributes):
        return _of_lists(match[1], devices)
    return _of_lists("", devices)


def mesh_axes_of_groups(groups: Groups, mesh: MeshShape) -> tuple[str, ...]:
    """Return the mesh axes along which the devices of a group differ, in mesh order."""
    return _axes_of(groups, tuple(mesh.axes.items()))


@functools.lru_cache(maxsize=4096)
def _axes_of(groups: Groups, axes: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    sizes = tuple(size for _, size in axes)
    members = [device for group in groups for device in group]
    firsts = [group[0] for group in groups for _ in group]
    coordinates, first_coordinates = (
        np.array(np.unravel_index(ids, sizes)) for ids in (members, firsts)
    )
    differ = (coordinates != first_coordinates).any(axis=1)
    return tuple(name for (name, _), is_different in zip(axes, differ, strict=True) if is_different)


@functools.lru_cache(maxsize=4096)
def _of_lists(lists: str, devices: int) -> Groups:
    groups = (_ints(group) for group in _BRACES.findall(lists))
    return tuple(group for group in groups if group) or (tuple(range(devices)),)


@functools.lru_cache(maxsize=4096)
def _of_iota(shape: str, sizes: str, order: str | None) -> Groups:
    return groups_from_iota(_ints(shape), _ints(sizes), _ints(order or ""))


@functools.lru_cache(maxsize=4096)
def _of_mesh(
    axes: str, sizes: str | None, order: str | None, listed: str | None, axes_used: str
) -> Groups:
    mesh = {name: int(size) for name, size in _AXIS_SIZE.findall(axes)}
    ids = _iota(_ints(sizes), _ints(order or "")) if sizes else np.arange(math.prod(mesh.values()))
    ids = np.array(_ints(listed)) if listed else ids.reshape(-1)
    spans = [
        (name, int(p or 1), int(n or mesh[name])) for name, p, n in _AXIS_USED.findall(axes_used)
    ]
    return groups_along_axes(mesh, ids, spans)


def groups_along_axes(mesh: Mapping[str, int], ids: np.ndarray, spans: Sequence[SubAxis]) -> Groups:
    """Return the groups along axes, or sub-axes, of a mesh in the compiler's notation.

    Args:
        mesh: size of each axis, in order.
        ids: device ids of the mesh, the last axis fastest.
        spans: axis, the product of the sizes before the sub-axis, size of the sub-axis. In HLO
            text 'a':(2)4 is a sub-axis of a with 4 devices and 2 before it: axis a of size n is
            reshaped to (2, 4, n / 8), the largest strides first.
    """
    dimensions = [sub_axis for name, size in mesh.items() for sub_axis in _cut(name, size, spans)]
    grid = ids.reshape([size for _, _, size in dimensions])
    inside = [
        index
        for name, before, size in spans
        for index, (axis, start, sub_size) in enumerate(dimensions)
        if axis == name and before <= start and start * sub_size <= before * size
    ]
    outside = [index for index in range(len(dimensions)) if index not in inside]
    width = math.prod(dimensions[index][2] for index in inside)
    return _rows(grid.transpose(outside + inside).reshape(-1, width))


def groups_from_iota(shape: Sequence[int], sizes: Sequence[int], order: Sequence[int]) -> Groups:
    """Return the rows of an iota of ids: reshaped to sizes, transposed, reshaped to shape."""
    return _rows(_iota(sizes, order).reshape(shape))


def _cut(name: str, size: int, spans: Sequence[SubAxis]) -> list[SubAxis]:
    """Split an axis into sub-axes (axis, product of the sizes before it, its size)."""
    sub_axes = [(before, sub_size) for axis, before, sub_size in spans if axis == name]
    points = sorted(
        {1, size} | {p for before, sub_size in sub_axes for p in (before, before * sub_size)}
    )
    cut = [(name, low, high // low) for low, high in itertools.pairwise(points)]
    return cut or [(name, 1, size)]


def _iota(sizes: Sequence[int], order: Sequence[int]) -> np.ndarray:
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(order) if order else ids


def _rows(groups: np.ndarray) -> Groups:
    return tuple(tuple(group) for group in groups.tolist())


def _ints(numbers: str | Sequence[str]) -> tuple[int, ...]:
    split = numbers.split(",") if isinstance(numbers, str) else numbers
    return tuple(int(digits) for digits in split if digits)
