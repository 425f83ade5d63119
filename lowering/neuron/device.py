"""NEFFs loaded on the Neuron cores of this machine, as functions of trees of arrays.

State stays on the devices: a program returns handles, which the next call accepts as arguments.
Only values that are read, such as a loss or a checkpoint, are copied to the host.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lowering.errors import LoweringError
from lowering.machine.rank_threads import RankThreads
from lowering.neuron.nrt import LoadedNeff, Runtime, RuntimeTensor
from lowering.per_device.layout import RankLayout
from lowering.trees import Tree, flatten, unflatten


@functools.cache
def runtime() -> Runtime:
    """Return the Neuron runtime of this process, initialised on first use.

    Raises:
        LoweringError: libnrt is not installed, or finds no device.
    """
    return Runtime()


class CoreArray:
    """Global array whose shards are tensors on Neuron cores, one for each rank."""

    def __init__(self, tensors: list[RuntimeTensor], layout: RankLayout) -> None:
        self.tensors, self.layout = tensors, layout
        self.shape, self.dtype, self.sharding = layout.shape, layout.dtype, layout.sharding

    def to_host(self) -> jax.Array:
        """Copy the array to host memory, with the same sharding."""
        self._check()
        shards = [
            np.frombuffer(tensor.read(), self.dtype).reshape(self.layout.shard_shape)
            for tensor in self.tensors
        ]
        device_shards = [
            jax.device_put(shard, device)
            for shard, device in zip(shards, self.layout.devices, strict=True)
        ]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, device_shards)

    def is_deleted(self) -> bool:
        """Return whether the array was donated, so that an output now uses its memory."""
        return not self.tensors

    def __float__(self) -> float:
        self._check()
        return float(np.frombuffer(self.tensors[0].read(), self.dtype)[0])

    def __int__(self) -> int:
        return int(float(self))

    def _check(self) -> None:
        if self.is_deleted():
            raise RuntimeError(
                "this array was donated to a step; use the array that the step returned"
            )


class NeffProgram:
    """A NEFF loaded for every rank; call it with the trees that its graph names, in order."""

    def __init__(self, neff: bytes, record: Mapping[str, Any], mesh: Mesh) -> None:
        """Load a NEFF onto the first cores of this machine.

        All ranks load at the same time, because loading synchronizes them.

        Raises:
            LoweringError: the Neuron runtime is missing, or it has fewer cores than the mesh has
                devices.
        """
        self._runtime, self._record = runtime(), record
        ranks = mesh.devices.size
        if self._runtime.cores() < ranks:
            raise LoweringError(
                f"the compiled {record['graph']} step is for {ranks} Neuron cores; this process "
                f"sees {self._runtime.cores()}; check NEURON_RT_VISIBLE_CORES and "
                "NEURON_LOGICAL_NC_CONFIG"
            )
        self._size, self._threads = ranks, RankThreads(ranks)
        load = functools.partial(self._runtime.load, neff, ranks=ranks)
        self._models: list[LoadedNeff] = self._threads.call(lambda rank: load(core=rank, rank=rank))
        self._inputs = {path: RankLayout(fact, mesh) for path, fact in record["inputs"].items()}
        self._outputs = {path: RankLayout(fact, mesh) for path, fact in record["outputs"].items()}
        self._in_place = dict(record["neuron"]["aliases"])  # output index to input index
        self._ranks = self._rank_tensors(ranks) if record["neuron"]["rank_input"] else []

    def __call__(self, *trees: Tree) -> Tree:
        input_arrays = [
            self._to_devices(leaf, self._inputs[path])
            for name, tree in zip(self._record["arguments"], trees, strict=True)
            for path, leaf in flatten(tree, name).items()
        ]
        output_arrays = [
            self._output_array(input_arrays, index, layout)
            for index, layout in enumerate(self._outputs.values())
        ]
        inputs = [array.tensors for array in input_arrays] + ([self._ranks] if self._ranks else [])

        def execute(rank: int) -> None:
            self._models[rank].execute(
                {f"input{index}": tensors[rank] for index, tensors in enumerate(inputs)},
                {
                    f"output{index}": array.tensors[rank]
                    for index, array in enumerate(output_arrays)
                },
            )

        self._threads.call(execute)
        for input_index in self._in_place.values():
            input_arrays[input_index].tensors = []
        return unflatten(dict(zip(self._outputs, output_arrays, strict=True)))

    def _to_devices(self, leaf: Any, layout: RankLayout) -> CoreArray:
        """Return an argument on the devices; copy it there if it is on the host."""
        if isinstance(leaf, CoreArray):
            leaf._check()
            if not leaf.sharding.is_equivalent_to(layout.sharding, len(layout.shape)):
                raise LoweringError(
                    f"an array sharded as {leaf.sharding.spec} was passed to the compiled "
                    f"{self._record['graph']} step, which expects {layout.sharding.spec}"
                )
            return leaf
        tensors = []
        for core, shard in enumerate(layout.shards(leaf)):
            tensors.append(self._runtime.tensor(layout.nbytes, core=core))
            tensors[-1].write(shard.tobytes())
        return CoreArray(tensors, layout)

    def _output_array(
        self, input_arrays: list[CoreArray], index: int, layout: RankLayout
    ) -> CoreArray:
        """Return an output's array, in the memory of the input it replaces or in new memory."""
        if index in self._in_place:
            return CoreArray(input_arrays[self._in_place[index]].tensors, layout)
        cores = range(self._size)
        return CoreArray([self._runtime.tensor(layout.nbytes, core=core) for core in cores], layout)

    def _rank_tensors(self, ranks: int) -> list[RuntimeTensor]:
        """Store the rank of each core in a tensor on that core."""
        tensors = [self._runtime.tensor(4, core=rank) for rank in range(ranks)]
        for rank, tensor in enumerate(tensors):
            tensor.write(np.uint32(rank).tobytes())
        return tensors
