"""Graphs that verify a training state: a copy of it, and checksums of what each device stores."""

from __future__ import annotations

from functools import reduce

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from graphtrain.graphs.names import CHECKSUMS, COPY_STATE
from lowering.graph import Graph
from lowering.tracing.constrain import on_each_device, placement
from lowering.trees import Tree, flatten
from sharding_rules.arrays import ArraySpec
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import make_layout
from sharding_rules.rules import Rules

_CHECKSUM = ArraySpec((), (), "uint32", "activation")
REPLICATED = "replicated"  # label of arrays that no mesh axis splits


def copy_graph(specs: Tree) -> Graph:
    """Build a graph that copies the state, so that a step can be computed from it twice."""

    def copy(state: Tree) -> Tree:
        # Without the barrier, JAX would return its inputs and copy nothing.
        return {"state": jax.lax.optimization_barrier(state)}

    return Graph(COPY_STATE, copy, {"state": specs}, {"state": specs}, runs_once=True)


def checksum_graph(specs: Tree, rules: Rules, mesh: MeshShape) -> Graph:
    """Build a graph of the checksums of the state on each device.

    There is one checksum for each set of mesh axes over which arrays are split. Devices with the
    same place along these axes are replicas: their checksums are equal. Each device has its own
    value of an output, although all have the same sharding.
    """
    labels = {path: _label(f"state/{path}", spec, rules, mesh) for path, spec in _arrays(specs)}
    names = sorted(set(labels.values()))

    def checksums(state: Tree) -> Tree:
        arrays, context = flatten(state), placement()
        assert context is not None
        splits = [
            PartitionSpec(*(axes or None for axes in _split(f"state/{path}", spec, rules, mesh)))
            for path, spec in _arrays(specs)
        ]

        def of_device(*shards: jax.Array) -> tuple[jax.Array, ...]:
            found = {name: jnp.zeros((), jnp.uint32) for name in names}
            for path, shard in zip(labels, shards, strict=True):
                found[labels[path]] = found[labels[path]] * 31 + array_checksum(shard)
            return tuple(found.values())

        outputs = tuple(PartitionSpec() for _ in names)
        values = on_each_device(of_device, splits, outputs)(*(arrays[path] for path in labels))
        return {"checksums": dict(zip(names, values, strict=True))}

    outputs = {"checksums": dict.fromkeys(names, _CHECKSUM)}
    return Graph(CHECKSUMS, checksums, {"state": specs}, outputs, runs_once=True)


def array_checksum(x: jax.Array) -> jax.Array:
    """Return the sum of the bits of each element times an odd number of its own, modulo 2^32.

    No change of a single element leaves it equal.
    """
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    words = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    strides = reduce(lambda sizes, size: [*(one * size for one in sizes), 1], x.shape, [])
    factors = jnp.zeros(x.shape, jnp.uint32)
    for dimension, stride in enumerate(strides):
        places = jax.lax.broadcasted_iota(jnp.uint32, x.shape, dimension)
        factors += places * jnp.uint32(stride % 2**32)
    return jnp.sum(words * (2 * factors + 1), dtype=jnp.uint32)


def _arrays(specs: Tree) -> list[tuple[str, ArraySpec]]:
    return list(flatten(specs).items())


def _split(path: str, spec: ArraySpec, rules: Rules, mesh: MeshShape) -> list[tuple[str, ...]]:
    """Return the mesh axes of more than one device that split each dimension of an array."""
    return [
        tuple(name for name in names if mesh.axes.get(name, 1) > 1)
        for names in make_layout(path, spec, rules, mesh).split
    ]


def _label(path: str, spec: ArraySpec, rules: Rules, mesh: MeshShape) -> str:
    """Return the mesh axes that split an array, in the order of the mesh: "fsdp+tensor"."""
    used = {name for names in _split(path, spec, rules, mesh) for name in names}
    return "+".join(name for name in mesh.axes if name in used) or REPLICATED
