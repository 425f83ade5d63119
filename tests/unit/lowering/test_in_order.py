"""A loaded CPU program keeps its collectives in order; see lowering.xla.cpu_collective_order."""

import pickletools
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lowering.xla.cpu_collective_order import (
    _collective_output,
    _inner,
    _messages,
    serialize_collective_order,
)

MESH = Mesh(np.array(jax.devices()[:4]), ("x",))
HERE = {"backend": jax.devices()[0].client, "execution_devices": jax.devices()[:4]}


def around_a_loop(x, weights, other):
    """A sum that neither waits for the loop, whose body communicates, nor the loop for it."""

    def layer(x, weight):
        return jnp.tanh(x @ jax.lax.all_gather(weight, "x", tiled=True)), None

    x, _ = jax.lax.scan(layer, x, weights)
    return x, jax.lax.psum(jnp.sin(other), "x"), jax.lax.psum(jnp.cos(x), "x")


def compiled(function, *inputs):
    specs = P("x"), P(None, "x"), P("x")
    placed = [
        jax.device_put(each, NamedSharding(MESH, spec))
        for each, spec in zip(inputs, specs, strict=True)
    ]
    mapped = jax.shard_map(
        function, mesh=MESH, in_specs=specs, out_specs=(P("x"), P(), P()), check_vma=False
    )
    return jax.jit(mapped).lower(*placed).compile(), placed


def check_equal(fresh, loaded, placed):
    wanted = jax.block_until_ready(fresh(*placed))  # two programs at once would wait for each other
    for want, got in zip(wanted, loaded(*placed), strict=True):
        np.testing.assert_array_equal(want, got)


def program(payload: bytes):
    steps = list(pickletools.genops(payload))
    (stored,) = [
        argument
        for index, (_, argument, _) in enumerate(steps)
        if isinstance(argument, bytes)
        and "exec" in [before for _, before, _ in steps[max(index - 2, 0) : index]]
    ]
    begin = next(index for index, byte in enumerate(stored) if byte < 0x80) + 1
    length = sum((byte & 0x7F) << (7 * index) for index, byte in enumerate(stored[:begin]))
    return _messages()["Stored"].FromString(stored[begin + length :]).program


def test_a_loop_that_communicates_is_linked_to_the_collectives_beside_it():
    random = np.random.default_rng(0)
    inputs = random.normal(size=(64, 32)), random.normal(size=(5, 32, 32)), random.normal(size=128)
    fresh, placed = compiled(around_a_loop, *(each.astype("float32") for each in inputs))
    payload, given, returned = serialize(fresh)
    ordered = serialize_collective_order(payload)

    before, after = program(payload).thunks, program(ordered).thunks
    assert len(after.thunks) > len(before.thunks)
    assert [len(users.indices) for users in after.users] == [
        len(users.indices) for users in before.users
    ]
    for users in after.users:
        assert all(_collective_output(after.thunks[index]) is not None for index in users.indices)
    communicating = [
        index for index, thunk in enumerate(after.thunks) if _collective_output(thunk) is not None
    ]
    around = [
        (first, second)
        for first, second in pairwise(communicating)
        if _inner(after.thunks[first]) or _inner(after.thunks[second])
    ]
    assert around
    for first, second in around:
        links = [after.thunks[index].copy for index in range(first + 1, second)]
        assert any(
            link.source.slice == _collective_output(after.thunks[first]).slice
            and link.destination.slice == _collective_output(after.thunks[second]).slice
            and list(link.source.shape.dimensions) == [0]
            for link in links
        )

    check_equal(fresh, deserialize_and_load(ordered, given, returned, **HERE), placed)


def test_a_program_without_such_loops_loads_as_it_was():
    def alone(x, weights, other):
        total = jax.lax.psum(other + weights.sum(), "x")
        return x, total, jax.lax.psum(jnp.sin(total), "x")

    inputs = np.ones((64, 8), "float32"), np.ones((1, 8, 32), "float32"), np.ones(128, "float32")
    fresh, placed = compiled(alone, *inputs)
    payload, given, returned = serialize(fresh)
    ordered = serialize_collective_order(payload)
    assert program(ordered) == program(payload)
    check_equal(fresh, deserialize_and_load(ordered, given, returned, **HERE), placed)
