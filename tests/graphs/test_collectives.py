"""Collectives read from what three compilers make of programs that state theirs."""

import importlib.util
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lowering import jax_xla
from lowering.collectives import Collective, read
from lowering.target import Target
from sharding_rules.mesh import MeshShape

MESH = MeshShape({"data": 2, "tensor": 4})
COMPILERS = [
    pytest.param("cpu:8"),
    pytest.param(
        "v5e:2x4",
        marks=pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="extra tpu"),
    ),
    pytest.param(
        "h100:8",
        marks=pytest.mark.skipif(
            not importlib.util.find_spec("jax_plugins"), reason="needs the extra gpu"
        ),
    ),
]
SIZE = 1024 * 256  # numbers a device holds
BYTES = SIZE * 4
LOCAL = {
    "all-reduce": lambda x: jax.lax.psum(x, "tensor"),
    "all-gather": lambda x: jax.lax.all_gather(x, "tensor", tiled=True)[: x.shape[0]] * 2,
    "reduce-scatter": lambda x: jnp.tile(jax.lax.psum_scatter(x, "tensor", tiled=True), (4, 1)),
    "all-to-all": lambda x: jax.lax.all_to_all(x, "tensor", 0, 0, tiled=True),
    "collective-permute": lambda x: jax.lax.ppermute(
        x, "tensor", [(index, (index + 1) % 4) for index in range(4)]
    ),
}
# An all-gather's bytes are those of its result, a reduce-scatter's those of its operand.
HANDLED = dict.fromkeys(LOCAL, BYTES) | {"all-gather": 4 * BYTES}


def compiled_text(target, body):
    mesh = jax_xla.make_mesh(MESH, jax_xla.described_devices(Target.parse(target)))
    spec = PartitionSpec(("data", "tensor"))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((8 * 1024, 256), "float32", sharding=NamedSharding(mesh, spec))
    return jax.jit(mapped).lower(x).compile().as_text()


@pytest.mark.parametrize("target", COMPILERS)
@pytest.mark.parametrize("op", LOCAL)
def test_one_collective_in_a_loop_is_counted_as_often_as_it_runs(op, target):
    def body(x):
        return jax.lax.scan(lambda x, _: (jnp.sin(LOCAL[op](x)), None), x, length=7)[0]

    reading = read(compiled_text(target, body), MESH)
    ops = Counter[str]()
    for collective in reading.collectives:
        ops[collective.op] += collective.count
        assert (collective.axes, collective.devices) == (("tensor",), 4)
        assert collective.bytes == HANDLED[op]
        assert collective.loops == (7,)
        assert "tests/graphs/test_collectives.py" in collective.source
    assert ops == {op: 7}
    assert reading.unknown_loops == 0


@pytest.mark.parametrize("target", COMPILERS)
def test_loops_in_loops_multiply(target):
    def twice(x, _):
        return jax.lax.scan(lambda x, _: (jnp.sin(LOCAL["all-reduce"](x)), None), x, length=3)

    reading = read(compiled_text(target, lambda x: jax.lax.scan(twice, x, length=5)[0]), MESH)
    assert [(one.count, one.loops) for one in reading.collectives] == [(15, (5, 3))]


def test_wire_bytes_are_those_of_the_best_algorithms():
    one = Collective("all-reduce", ("tensor",), 4, 10, 1000)
    assert one.wire_bytes == 2 * 3 / 4 * 1000
    assert one.wire_bytes_per_step == 15_000
    gather = Collective("all-gather", ("tensor",), 4, 1, 1000)
    assert gather.wire_bytes == 750
    assert Collective.from_record(gather.to_record()) == gather
