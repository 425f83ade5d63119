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
        process = jax.process_index()
        # By rank; other processes have the others.
        self.devices = [one for one in mesh.devices.reshape(-1) if one.process_index == process]

    @property
    def nbytes(self) -> int:
        """Of one shard."""
        return int(np.prod(self.shard, dtype=int)) * self.dtype.itemsize

    def shards(self, array: Any) -> Iterator[np.ndarray]:
        """Of an array in the host's memory the shards for devices of this process, by rank.

        Args:
            array: all of it, or a jax.Array that is split over the processes in the same way.
        """
        is_placed = isinstance(array, jax.Array) and array.sharding.is_equivalent_to(
            self.sharding, array.ndim
        )
        if not is_placed:
            whole = np.asarray(array)
            array = jax.make_array_from_callback(
                whole.shape, self.sharding, lambda index: whole[index]
            )
        by_device = {each.device: each.data for each in array.addressable_shards}
        for device in self.devices:
            yield np.ascontiguousarray(by_device[device])
