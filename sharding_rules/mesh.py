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
    def resolve(cls, sizes: Mapping[str, int | Literal["rest"]], devices: int) -> "MeshShape":
        """Return the mesh in which the axis "rest" has the size that uses all devices.

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
            remedy = (
                f"{devices} is not a multiple of {fixed.devices}; use sizes whose product divides "
                f"{devices}"
                if remainder
                else f'set one axis to "rest", or use a target of {fixed.devices} devices'
            )
            raise ShardingError(
                f"mesh: {fixed} does not use all {devices} devices of the target; {remedy}"
            )
        return cls({**fixed.axes, **dict.fromkeys(rest_axes, quotient)})

    @property
    def devices(self) -> int:
        return math.prod(self.axes.values())

    def size(self, names: tuple[str, ...]) -> int:
        """Return the number of devices along several mesh axes; an absent axis has size 1."""
        return math.prod(self.axes.get(name, 1) for name in names)

    def __str__(self) -> str:
        split = (f"{name} {size}" for name, size in self.axes.items() if size > 1)
        return " x ".join(split) or "1 device"
