"""MeshShape: names and sizes of mesh axes, without devices."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sharding_rules.axes import MESH_AXES, check_axes
from sharding_rules.errors import ShardingError


@dataclass(frozen=True)
class MeshShape:
    """Size of each mesh axis, always in the order of MESH_AXES: slowest links first."""

    axes: Mapping[str, int]

    def __post_init__(self) -> None:
        check_axes(self.axes, MESH_AXES, "mesh")
        for name, size in self.axes.items():
            if size < 1:
                raise ShardingError(f"mesh: {name} = {size}, but a mesh axis has at least 1 device")
        ordered = {name: self.axes[name] for name in MESH_AXES if name in self.axes}
        object.__setattr__(self, "axes", ordered)

    @classmethod
    def resolve(
        cls,
        sizes: Mapping[str, int | Literal["rest"]],
        devices: int,
        target: str = "the target",
    ) -> "MeshShape":
        """Return the mesh in which the axis "rest" has the size that uses all devices.

        Args:
            sizes: size of each axis.
            devices: number of devices of the target.
            target: name of the target, for messages.

        Raises:
            ShardingError: several axes are "rest", or the product of the sizes is not the number of
                devices.
        """
        fixed = cls({name: size for name, size in sizes.items() if size != "rest"})
        rest_axes = [name for name, size in sizes.items() if size == "rest"]
        if len(rest_axes) > 1:
            raise ShardingError(f'mesh: only one axis can be "rest", not {" and ".join(rest_axes)}')
        quotient, remainder = divmod(devices, fixed.devices)
        if remainder or not (rest_axes or quotient == 1):
            raise ShardingError(fixed._misfit(devices, target, bool(rest_axes)))
        return cls({**fixed.axes, **dict.fromkeys(rest_axes, quotient)})

    @property
    def devices(self) -> int:
        return math.prod(self.axes.values())

    def size(self, names: tuple[str, ...]) -> int:
        """Return the number of devices along several mesh axes; an absent axis has size 1."""
        devices = 1
        for name in names:  # a third of math.prod's time, in millions of calls of a search
            devices *= self.axes.get(name, 1)
        return devices

    def across(self, slices: int) -> dict[str, int]:
        """Return the part of each mesh axis that runs across slices; the rest is inside of one.

        The slowest axes take it: data first, then fsdp. In a mesh of data 4 x fsdp 16 on 2 slices,
        2 of data's 4 are the slices, and each of these holds data 2 x fsdp 16.

        Args:
            slices: number of equal slices; it divides the number of devices.
        """
        left, parts = slices, {}
        for name, size in self.axes.items():
            parts[name] = math.gcd(size, left)
            left //= parts[name]
        return parts

    def _misfit(self, devices: int, target: str, has_rest: bool) -> str:
        """Say why these sizes do not use the devices of a target, and which sizes or target do."""
        axes = " x ".join(f"mesh.{name}" for name, size in self.axes.items() if size > 1)
        used, has = self.devices, f"{target} has {devices}"
        if used < devices and devices % used == 0:
            if not axes:
                return f'no axis of the mesh is above 1, and {has}; set one, as in data = "rest"'
            remedy = f'set one axis to "rest", or use a target of {used} devices'
            return f"{axes} = {used} uses {used} of the devices, and {has}; {remedy}"
        needed = f"a multiple of {used}" if has_rest else str(used)
        least = 1 if has_rest else devices
        sizes = [str(size) for size in range(least, devices + 1) if devices % size == 0]
        choice = " or ".join(filter(None, [", ".join(sizes[:-1]), sizes[-1]]))
        choice = f"sizes whose product is {choice}" if " x " in axes else f"{axes} = {choice}"
        remedy = f"choose a target of {used} devices, or {choice}"
        return f"{axes} = {used} needs {needed} devices, and {has}; {remedy}"

    def __str__(self) -> str:
        split = (f"{name} {size}" for name, size in self.axes.items() if size > 1)
        return " x ".join(split) or "1 device"
