"""Where the shards of an array go, by rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class ArrayLayout:
    """Shape, dtype and layout of an array, as a program's record tells them."""

    def __init__(self, fact: Mapping[str, Any], mesh: Mesh) -> None:
        self.shape, self.dtype = tuple(fact["shape"]), jax.numpy.dtype(fact["dtype"])
        split = PartitionSpec(*(tuple(names) or None for names in fact["split"]))
        self.sharding = NamedSharding(mesh, split)
        self.shard = self.sharding.shard_shape(self.shape)
        self.devices = list(mesh.devices.reshape(-1))  # by rank

    @property
    def nbytes(self) -> int:
        """Of one shard."""
        return int(np.prod(self.shard, dtype=int)) * self.dtype.itemsize

    def shards(self, array: Any) -> Iterator[np.ndarray]:
        """The shards of an array that is in the host's memory, by rank."""
        placed = jax.device_put(array, self.sharding)
        by_device = {each.device: each.data for each in placed.addressable_shards}
        for device in self.devices:
            yield np.ascontiguousarray(by_device[device])
