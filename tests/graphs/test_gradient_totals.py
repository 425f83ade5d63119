"""Gradients of a pipeline's stages that are summed over data beside the last backward passes."""

from dataclasses import replace
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from programs import LLAMA, lower, program
from unoptimized import OPTIONS

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, PipelineSettings
from graphtrain.cost_model.traffic import predict_collectives
from lowering.hlo.collectives import Collective
from lowering.pipeline.gradient_totals import GradientTotals, with_rows
from lowering.pipeline.recorded import TickOrder
from lowering.pipeline.ring import Ring
from lowering.xla import backend as xla
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


@pytest.mark.skipif(not find_spec("jax_plugins"), reason="no jax_plugins")
def test_on_gpus_a_tick_computes_while_gradients_are_summed():
    of = program(
        target="h100:4",
        mesh=Mesh(data=2, stage=2),
        model=replace(LLAMA, layers=8),
        batch=Batch(global_batch_size=16, seq_len=16, microbatches=4),
        pipeline=PipelineSettings(schedule="1f1b", virtual_stages=2),
    )
    record = xla.compile(lower(of, "gradients")).record
    compiled = [Collective.from_record(each) for each in record["collectives"]]
    predicted = predict_collectives(resolve(of))
    (beside,) = (one for one in compiled if one.beside_tick)
    assert beside.loops == (2,)  # a row of two in each
    sums = sum(one.wire_bytes_per_step for one in predicted if one.beside_tick)
    assert beside.wire_bytes_per_step == sums > 0
    after = sum(one.wire_bytes for one in compiled if one.exposed and one.axes == ("data",))
    assert after == pytest.approx(sums, rel=0.01)  # and a few scalars
