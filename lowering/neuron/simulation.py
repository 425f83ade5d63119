"""Simulation of a Neuron machine: run a normalised module on this machine's CPU through XLA.

The same module that neuronx-cc would compile runs on as many replicas as the target has devices,
with its own replica groups: a wrong replica group or donation shows up as a wrong loss.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lowering.hlo.proto import Message, read_module, write_module
from lowering.trees import Tree, flatten, unflatten
from lowering.xla import private

Device = Any


def compile_module(hlo: bytes, devices: Sequence[Device], options_of_xla: Mapping[str, Any]) -> Any:
    """Compile a normalised module for CPU devices, with one replica on each."""
    module = private.stablehlo(_merge_split_broadcasts(hlo))
    return private.compile_replicas(module, devices, options_of_xla)


def _merge_split_broadcasts(hlo: bytes) -> bytes:
    """Merge the instructions into which XLA splits a broadcast along array axes of size 1.

    XLA splits such a broadcast into one that changes nothing, a reshape, and another broadcast.
    Conversion to StableHLO and back would drop two of them, and XLA would then divide in a softmax
    where it otherwise multiplies: in bfloat16, losses would differ from those of a CPU target.
    """
    module = read_module(hlo)
    for computation in module.computations:
        by_id = {instruction.id: instruction for instruction in computation.instructions}
        for instruction in computation.instructions:
            source = _source_of_broadcast(instruction, by_id)
            if source is not None:
                instruction.operand_ids[:] = [source.id]
                instruction.dimensions[:] = range(len(source.shape.dimensions))
    return write_module(module)


def _source_of_broadcast(last: Message, by_id: Mapping[int, Message]) -> Message | None:
    """Return the operand that the three instructions ending with `last` broadcast, or None."""
    chain = [last]
    for opcode in ("broadcast", "reshape", "broadcast"):
        if chain[-1].opcode != opcode or len(chain[-1].operand_ids) != 1:
            return None
        chain.append(by_id[chain[-1].operand_ids[0]])
    _, reshaped, first_broadcast, source = chain
    sizes, kept_axes = list(source.shape.dimensions), list(last.dimensions)
    changes_nothing = list(first_broadcast.dimensions) == list(range(len(sizes)))
    dropped_sizes = [size for axis, size in enumerate(sizes) if axis not in kept_axes]
    fits = len(sizes) == len(last.shape.dimensions) and set(dropped_sizes) <= {1}
    if not (fits and changes_nothing and list(first_broadcast.shape.dimensions) == sizes):
        return None
    kept_sizes = [sizes[axis] for axis in kept_axes]
    return source if list(reshaped.shape.dimensions) == kept_sizes else None


def load_module(executable: bytes, devices: Sequence[Device]) -> Any:
    """Load the serialized result of `compile_module`."""
    return private.load_replicas(executable, devices)


class SimulatedProgram:
    """A loaded module as a function of trees of global arrays.

    Each shard stays on the device of its rank; donated arrays are deleted.
    """

    def __init__(self, executable: Any, record: Any, mesh: Mesh) -> None:
        self._executable = executable
        self._arguments = record["arguments"]
        self._inputs = {path: _sharding_of(fact, mesh) for path, fact in record["inputs"].items()}
        self._outputs = [
            (path, tuple(fact["shape"]), _sharding_of(fact, mesh))
            for path, fact in record["outputs"].items()  # in the order of flatten, as compiled
        ]
        self._rank = _ranks(mesh) if record["neuron"]["rank_input"] else None

    def __call__(self, *trees: Tree) -> Tree:
        arrays = [
            jax.device_put(leaf, self._inputs[path])
            for name, tree in zip(self._arguments, trees, strict=True)
            for path, leaf in flatten(tree, name).items()
        ]
        if self._rank is not None:
            arrays.append(self._rank)
        shards_by_output = private.run_replicas(self._executable, arrays)
        return unflatten(
            {
                path: jax.make_array_from_single_device_arrays(shape, sharding, list(shards))
                for (path, shape, sharding), shards in zip(
                    self._outputs, shards_by_output, strict=True
                )
            }
        )


def _sharding_of(fact: Any, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(tuple(names) or None for names in fact["split"])))


def _ranks(mesh: Mesh) -> jax.Array:
    """Return a scalar with a different value on each device: the device's rank."""
    devices = mesh.devices.reshape(-1)
    shards = [jax.device_put(np.uint32(rank), device) for rank, device in enumerate(devices)]
    return jax.make_array_from_single_device_arrays(
        (), NamedSharding(mesh, PartitionSpec()), shards
    )
