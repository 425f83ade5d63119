"""Gradients of a pipeline's stages that are summed over data beside the last backward passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from unoptimized import OPTIONS

from lowering.pipeline.gradient_totals import GradientTotals, with_rows
from lowering.pipeline.recorded import TickOrder
from lowering.pipeline.ring import Ring
from lowering.xla.backend import make_mesh
from sharding_rules.mesh import MeshShape

COPIES = 2


@pytest.mark.parametrize(
    ("stages", "rounds", "rows", "ticks"),
    [
        (4, 2, 1, 1),
        (4, 2, 6, 3),  # two rows in each
        (2, 3, 3, 3),  # two rows, in one tick of two rounds
        (2, 2, 3, 1),  # one row remains
        (4, 1, 3, 0),
    ],
)
def test_each_row_is_summed_once(stages, rounds, rows, ticks):
    shape = (rounds, rows, 5) if rounds > 1 else (rows, 5)
    given = np.random.default_rng(0).normal(size=(COPIES, *shape)).astype(np.float32)
    order = TickOrder(Ring("stage", stages), 2 * stages, rounds)

    def of_device(gradients):
        gradients = {"up": gradients[0], "down": 2 * gradients[0]}
        totals = GradientTotals.of(order, ("data",), gradients)
        assert len(totals.ticks) == ticks

        def tick(gradients, number):
            return with_rows(gradients, *totals.of_tick(gradients, number)), None

        if totals.ticks:
            gradients, _ = jax.lax.scan(tick, gradients, jnp.array(totals.ticks))
        return totals.after_ticks(gradients)

    mesh = make_mesh(MeshShape({"data": COPIES}), jax.devices()[:COPIES])
    split = PartitionSpec("data")
    run = jax.shard_map(
        of_device, mesh=mesh, in_specs=split, out_specs=PartitionSpec(), check_vma=False
    )
    got = jax.jit(run, compiler_options=OPTIONS)(given)
    for name, factor in (("up", 1), ("down", 2)):
        np.testing.assert_allclose(got[name], factor * given.sum(0), rtol=1e-6)
