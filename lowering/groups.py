"""Which devices a collective joins, in the four ways XLA writes it, and the mesh axes that means.

Devices are logical: positions in the mesh, row-major.
"""

from __future__ import annotations

import itertools
import re

import numpy as np

from sharding_rules.mesh import MeshShape

_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?"
    r"\{([^}]*)\}"
)
_LISTS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?\s*)*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def groups_of(text: str, devices: int) -> list[list[int]]:
    """Devices that exchange with each other; for a permutation, its (source, target) pairs.

    Args:
        text: of one instruction, from its operands on.
        devices: in the mesh; all of them are one group where the text names none.
    """
    if found := _PAIRS.search(text):
        return _lists(found[1])
    if found := _IOTA.search(text):
        rows, columns = _integers(found[1])
        return _arranged(found[2], found[3]).reshape(rows, columns).tolist()
    if found := _MESH.search(text):
        return _of_mesh(*found.groups())
    found = _LISTS.search(text)
    listed = _lists(found[1]) if found else []
    return [group for group in listed if group] or [list(range(devices))]


def axes_of(groups: list[list[int]], mesh: MeshShape) -> tuple[str, ...]:
    """Mesh axes along which the devices of a group differ, slowest first."""
    sizes = tuple(mesh.axes.values())
    differ: set[int] = set()
    for group in groups:
        places = np.array(np.unravel_index(np.array(group), sizes))
        differ |= set(np.flatnonzero(np.any(places != places[:, :1], axis=1)).tolist())
    return tuple(name for index, name in enumerate(mesh.axes) if index in differ)


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _lists(text: str) -> list[list[int]]:
    return [_integers(inner) for inner in re.findall(r"\{([\d,]*)\}", text)]


def _arranged(sizes: str, order: str | None) -> np.ndarray:
    shape = _integers(sizes)
    devices = np.arange(int(np.prod(shape))).reshape(shape)
    return devices.transpose(_integers(order)) if order else devices


def _of_mesh(axes: str, sizes: str | None, order: str | None, chosen: str) -> list[list[int]]:
    """A mesh of the compiler's own axes, and those that vary; "x":(2)4 is a part of an axis.

    An axis of 16 read as (2)4 is split in 2 x 4 x 2, of which the middle varies.
    """
    named = [(name, int(size)) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)]
    used = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", chosen)
    parts: list[tuple[str, int, int]] = []  # axis, devices before the part, devices of the part
    for name, size in named:
        cuts = {1, size}
        for user, before, length in used:
            if user == name and before:
                cuts |= {int(before), int(before) * int(length)}
        edges = sorted(cuts)
        parts += [(name, low, high // low) for low, high in itertools.pairwise(edges)]
        parts += [(name, 1, 1)] if size == 1 else []
    count = int(np.prod([size for _, size in named]))
    devices = (_arranged(sizes, order) if sizes else np.arange(count)).reshape(-1)
    varying = [index for index, part in enumerate(parts) if _is_used(part, used)]
    others = [index for index in range(len(parts)) if index not in varying]
    shaped = devices.reshape([length for _, _, length in parts])
    width = int(np.prod([parts[index][2] for index in varying])) if varying else 1
    return shaped.transpose(others + varying).reshape(-1, width).tolist()


def _is_used(part: tuple[str, int, int], used: list[tuple[str, str, str]]) -> bool:
    name, before, length = part
    return any(
        user == name
        and (not low or (int(low) <= before and before * length <= int(low) * int(wide)))
        for user, low, wide in used
    )
