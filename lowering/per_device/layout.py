"""Layout of an array: its sharding, and its shards by rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class RankLayout:
    """Shape, dtype and sharding of an array, from a program's record."""

    def __init__(self, fact: Mapping[str, Any], mesh: Mesh) -> None:
        self.shape, self.dtype = tuple(fact["shape"]), jax.numpy.dtype(fact["dtype"])
        split = PartitionSpec(*(tuple(names) or None for names in fact["split"]))
        self.sharding = NamedSharding(mesh, split)
        self.shard_shape = self.sharding.shard_shape(self.shape)
        process = jax.process_index()
        # In rank order; only those of this process.
        self.devices = [
            device for device in mesh.devices.reshape(-1) if device.process_index == process
        ]

    @property
    def nbytes(self) -> int:
        """Size of one shard in bytes."""
        return int(np.prod(self.shard_shape, dtype=int)) * self.dtype.itemsize

    def shards(self, array: Any) -> Iterator[np.ndarray]:
        """Yield the shards of an array in host memory for this process's devices, in rank order.

        Args:
            array: the complete array, or a jax.Array that already has this sharding.
        """
        is_placed = isinstance(array, jax.Array) and array.sharding.is_equivalent_to(
            self.sharding, array.ndim
        )
        if not is_placed:
            host_array = np.asarray(array)
            array = jax.make_array_from_callback(
                host_array.shape, self.sharding, lambda index: host_array[index]
            )
        by_device = {shard.device: shard.data for shard in array.addressable_shards}
        for device in self.devices:
            yield np.ascontiguousarray(by_device[device])
