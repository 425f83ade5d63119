"""make_plan: apply sharding rules to every array, or raise an error that says why it fails."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sharding_rules.arrays import ArraySpec, Memory
from sharding_rules.errors import ShardingError
from sharding_rules.mesh import MeshShape
from sharding_rules.rules import Rules

_MAX_DIVISORS = 12  # maximum number of divisors in an error message


@dataclass(frozen=True)
class ArrayLayout:
    """Sharding of one array: the mesh axes that split each dimension."""

    spec: ArraySpec
    split: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Plan:
    """Layout of every array on the mesh, by path."""

    mesh: MeshShape
    layouts: Mapping[str, ArrayLayout]

    def shard_shape(self, path: str) -> tuple[int, ...]:
        """Return the shape of one device's shard."""
        layout = self.layouts[path]
        return tuple(
            size // self.mesh.size(names)
            for size, names in zip(layout.spec.shape, layout.split, strict=True)
        )

    def shard_bytes(self, path: str) -> int:
        """Return the bytes of one device's shard."""
        layout = self.layouts[path]
        shards = self.mesh.size(tuple(name for names in layout.split for name in names))
        return layout.spec.nbytes // shards

    def bytes_per_device(self, role: str | None = None, memory: Memory = "device") -> int:
        """Return the bytes of one device's shards of all arrays, or of those with a role.

        Args:
            role: role of the arrays; None for all roles.
            memory: count only arrays in this memory: the device's, or that of its host.
        """
        return sum(
            self.shard_bytes(path)
            for path, layout in self.layouts.items()
            if layout.spec.memory == memory and (role is None or layout.spec.role == role)
        )


def make_plan(arrays: Mapping[str, ArraySpec], rules: Rules, mesh: MeshShape) -> Plan:
    """Return the layout of every array by the rules.

    Raises:
        ShardingError: mesh axes do not divide a dimension, or one would split two dimensions.
    """
    return Plan(mesh, {path: make_layout(path, spec, rules, mesh) for path, spec in arrays.items()})


def has_general_layout(path: str, spec: ArraySpec, rules: Rules, mesh: MeshShape) -> bool:
    """Return whether rules of single arrays shard an array as the tables shard its axes.

    Raises:
        ShardingError: as make_layout().
    """
    general = make_layout("", spec, rules, mesh)
    return make_layout(f"{spec.role}/{path}", spec, rules, mesh) == general


def make_layout(path: str, spec: ArraySpec, rules: Rules, mesh: MeshShape) -> ArrayLayout:
    """Return the layout of one array. Mesh axes that are absent or of size 1 are ignored.

    Raises:
        ShardingError: mesh axes do not divide a dimension, or one would split two dimensions.
    """
    table = rules.table_for(spec.role, path)
    split: list[tuple[str, ...]] = []
    for axis, size in zip(spec.axes, spec.shape, strict=True):
        rule_axes = table.get(axis, ()) if axis else ()
        names = tuple(name for name in rule_axes if mesh.axes.get(name, 1) > 1)
        for name in names:
            if any(name in earlier for earlier in split):
                raise ShardingError(
                    f"{path}: mesh axis {name!r} would split two dimensions of "
                    f"{spec.axes}; change the rule for {axis!r}"
                )
        if size % mesh.size(names):
            raise ShardingError(_does_not_divide(path, axis, size, names, mesh))
        split.append(names)
    return ArrayLayout(spec, tuple(split))


def common_divisors(size: int, devices: int) -> list[int]:
    """Return the largest numbers of shards into which both a size and a mesh divide."""
    return divisors(math.gcd(size, devices))[-_MAX_DIVISORS:]


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, the smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _does_not_divide(
    path: str, axis: str | None, size: int, names: tuple[str, ...], mesh: MeshShape
) -> str:
    shards = mesh.size(names)
    lower_multiple = size // shards * shards
    sizes = f"{lower_multiple} or {lower_multiple + shards}" if lower_multiple else f"{shards}"
    divisors = ", ".join(map(str, common_divisors(size, mesh.devices)))
    return (
        f"{path}: axis {axis!r} has size {size}, which {' x '.join(names)} = {shards} does not "
        f"divide; sizes that divide: {axis} = {sizes}, or {' x '.join(names)} = {divisors}"
    )
