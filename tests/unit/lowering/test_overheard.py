"""XLA's word of an array that it makes whole."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lowering.xla.compiler_log import capture_compiler_log


def resharded(before, after):
    """What is heard while a reshard compiles, on a mesh of 2 x 2 x 2."""
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 2, 2), ("a", "b", "c"))

    def step(x):
        there = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, before))
        return jax.lax.with_sharding_constraint(jnp.sin(there), NamedSharding(mesh, after))

    with capture_compiler_log() as found:
        jax.jit(step).lower(jnp.ones((16, 16, 16))).compile()
    return found


def test_an_array_made_whole_is_heard_and_passed_on(capfd):
    (found,) = resharded(PartitionSpec(("a", "b", "c")), PartitionSpec("b", "a"))
    assert found["scope"] == "jit(step)/sharding_constraint"
    before, after = found["before"], found["after"]  # their syntax is that of the XLA version
    assert before.startswith("{") and after.startswith("{") and before != after
    assert found["shape"] == "f32[2,16,16]"
    assert "Involuntary full rematerialization" in capfd.readouterr().err


def test_a_reshard_by_exchange_is_no_matter(capfd):
    assert resharded(PartitionSpec("a", "b"), PartitionSpec("b", "a")) == []
    assert "Involuntary" not in capfd.readouterr().err
