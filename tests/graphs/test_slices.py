"""A step on two TPU slices, compiled without them: placement, and what crosses the DCN."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lowering.hlo.collectives import read
from lowering.machine.target import Target
from lowering.xla import backend
from lowering.xla.devices import fingerprint
from sharding_rules.mesh import MeshShape

pytestmark = pytest.mark.skipif(find_spec("libtpu") is None, reason="no libtpu")
TARGET, SHAPE, WIDTH = Target.parse("2xv5e:2x2"), MeshShape({"data": 4, "fsdp": 2}), 256


@pytest.fixture(scope="module")
def mesh():
    return backend.make_mesh(SHAPE, backend.compile_devices(TARGET))


def test_the_slowest_axis_runs_across_slices(mesh):
    slices = [[device.slice_index for device in row] for row in mesh.devices]
    assert slices == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert fingerprint([*mesh.devices.flat]).endswith("8 devices in 2 slices")


def test_gradients_cross_slices_once_as_shards_of_a_slice(mesh):
    def step(weight, rows):
        return weight - jax.grad(lambda weight: (rows @ weight).sum() ** 2)(weight)

    def array(split, *shape):
        sharding = NamedSharding(mesh, PartitionSpec(split))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    weight, rows = array("fsdp", WIDTH, WIDTH), array(("data", "fsdp"), 64, WIDTH)
    jitted = jax.jit(step, out_shardings=weight.sharding)
    facts = read(jitted.lower(weight, rows).compile().as_text(), SHAPE, TARGET.slices)
    across = [each for each in facts.collectives if each.network == "dcn"]
    sent = sum(each.bytes for each in across if each.op == "all-reduce" and each.bytes > 1024)
    # Gradients are split over fsdp 2 and the half of data 4 that is inside of a slice; float32.
    assert sent == 4 * WIDTH * WIDTH / (2 * 2)
    assert {each.axes for each in across} == {("data",)}
    inside = [each for each in facts.collectives if each.axes == ("data",) and not each.network]
    assert {each.op for each in inside} >= {"reduce-scatter", "all-gather"}
    assert {each.devices for each in inside} == {2}
