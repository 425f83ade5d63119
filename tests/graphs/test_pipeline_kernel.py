"""The schedules on their own, with stages that are not of a language model."""

import dataclasses
import functools
from types import MappingProxyType

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from unoptimized import OPTIONS

from lowering.pipeline.one_f_one_b import one_f_one_b_gradients
from lowering.pipeline.schedule import PartWeights, Pipeline, PipelineLoss
from lowering.pipeline.schedules import pipeline_loss
from lowering.tracing.constrain import manual_axes, placement, use_placement
from lowering.xla.devices import make_mesh
from sharding_rules.mesh import MeshShape
from sharding_rules.pipeline import one_f_one_b_phases, tick_count
from sharding_rules.rules import Rules

STAGES, MICROBATCHES, WIDTH = 4, 8, 6
RULES = Rules.load(("data", "pipeline", "context"))


def first(weights, microbatch, number):
    return microbatch["x"] @ weights + number


def layers(rows, x, number, chunk):
    """The term is a mean over sequences; times 1 + number, it tells if a bubble was counted.

    The metric is another mean, whose gradient no schedule may add.
    """

    def layer(x, row):
        y = jnp.tanh(x @ row)
        scale = 1 + number
        return y, ({"square": jnp.mean(y**2) * scale}, {"mean": jnp.mean(y) * scale})

    x, scalars = jax.lax.scan(layer, x, rows)
    return x, *jax.tree.map(jnp.sum, scalars)


def last(weights, x, microbatch):
    error = (x @ weights)[..., 0] - microbatch["y"]
    return jnp.sum(error**2), jnp.sum(jnp.abs(error))


def given(rounds):
    random = np.random.default_rng(0)
    rows = random.normal(size=(STAGES * rounds * 2, WIDTH, WIDTH)).astype(np.float32)
    parameters = {
        "first": random.normal(size=(WIDTH, WIDTH)).astype(np.float32),
        "stages": rows if rounds == 1 else rows.reshape(rounds, -1, WIDTH, WIDTH),
        "last": random.normal(size=(WIDTH, 1)).astype(np.float32),
    }
    shape = MICROBATCHES, 4, STAGES  # sequences of a microbatch, positions
    microbatches = {
        "x": random.normal(size=(*shape, WIDTH)).astype(np.float32),
        "y": random.normal(size=shape).astype(np.float32),
    }
    return parameters, microbatches


def one_after_the_other(parameters, microbatches, stage=layers):
    """Two layers to a chunk, as a pipeline of one round has them."""
    chunks = parameters["stages"].reshape(-1, 2, WIDTH, WIDTH)
    objective = reported = mean = jnp.float32(0)
    for number in range(MICROBATCHES):
        microbatch = {name: array[number] for name, array in microbatches.items()}
        x = first(parameters["first"], microbatch, number)
        for rows in chunks:
            x, terms, metrics = stage(rows, x, number, 0)
            objective, mean = objective + terms["square"], mean + metrics["mean"]
        score, report = last(parameters["last"], x, microbatch)
        objective, reported = objective + score, reported + report
    return PipelineLoss(objective, (reported, {"mean": mean}))


@functools.cache
def reference(rounds, stage=layers):
    """Value and gradients of one_after_the_other."""
    alone = functools.partial(one_after_the_other, stage=stage)
    return compiled(jax.value_and_grad(alone, has_aux=True))(*given(rounds))


def compiled(run):
    return jax.jit(run, compiler_options=OPTIONS)


def of_trained(part):
    """A part of a pipeline that gets its trained weights alone."""
    return lambda weights, *inputs: part(weights.trained, *inputs)


def in_stages(pipeline, schedule, sizes=MappingProxyType({"data": 2, "stage": STAGES})):
    """A schedule of a pipeline on 8 devices, not yet compiled."""
    mesh = make_mesh(MeshShape(sizes), jax.devices())
    pipeline = dataclasses.replace(
        pipeline,
        first=of_trained(pipeline.first),
        stage=of_trained(pipeline.stage),
        last=of_trained(pipeline.last),
    )

    def run(parameters, *arguments):
        parts = {part: PartWeights(weights) for part, weights in parameters.items()}
        with use_placement(mesh, RULES):
            return schedule(pipeline, parts, *arguments)

    return run


def assert_close(got, want):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)


def loops(jaxpr):
    """Lengths of the scans that pass something on."""
    for equation in jaxpr.eqns:
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            if equation.primitive.name == "scan" and "ppermute" in str(inner):
                yield equation.params["length"]
            yield from loops(inner)


@pytest.mark.parametrize("joint", [False, True], ids=["data by hand", "data automatic"])
@pytest.mark.parametrize("rounds", [1, 2])
def test_value_and_gradient_are_those_of_one_microbatch_after_the_other(rounds, joint):
    pipeline = Pipeline(first, layers, last, virtual_stages=rounds, mixes_sequences=joint)
    run = jax.value_and_grad(in_stages(pipeline, pipeline_loss), has_aux=True)
    assert_close(compiled(run)(*given(rounds)), reference(rounds))


@pytest.mark.parametrize(
    ("rounds", "joint"),
    [(1, False), (1, True), (2, False), (2, True)],
    ids=["data by hand", "data automatic", "interleaved", "interleaved, data automatic"],
)
def test_one_forward_one_backward_has_the_same_value_and_gradients(rounds, joint):
    pipeline = Pipeline(first, layers, last, virtual_stages=rounds, mixes_sequences=joint)
    value, gradients = reference(rounds)
    got = compiled(in_stages(pipeline, one_f_one_b_gradients))(*given(rounds))
    assert_close(got, (PipelineLoss(*value), gradients))


@pytest.mark.parametrize(
    ("schedule", "rounds"), [("gpipe", 1), ("circular", 2), ("1f1b", 1), ("1f1b", 2)]
)
def test_loops_have_the_ticks_of_the_timeline(schedule, rounds):
    pipeline = Pipeline(first, layers, last, virtual_stages=rounds)
    if schedule == "1f1b":
        run = in_stages(pipeline, one_f_one_b_gradients)
    else:
        run = jax.grad(in_stages(pipeline, pipeline_loss), has_aux=True)
    found = list(loops(jax.make_jaxpr(run)(*given(rounds)).jaxpr))
    if schedule == "1f1b":  # the loop in the middle has passes of both kinds
        early, both, *late = found
        phases = one_f_one_b_phases(STAGES, rounds, MICROBATCHES)
        assert (early, both, sum(late)) == phases
        # Beside the last ones, gradients of the two rows of the second round are summed.
        assert late[1:] == [2] * (rounds - 1)
        found.append(both)
    assert sum(found) == tick_count(STAGES, rounds, MICROBATCHES)


def rolled(x):
    """x half-way round its positions: by hand, where they are split over context."""
    found = placement()
    if found is None:
        return jnp.roll(x, x.shape[1] // 2, axis=1)

    def by_device(x):
        with manual_axes(("context",)):
            return jax.lax.ppermute(x, "context", [(0, 1), (1, 0)])

    split = PartitionSpec(None, "context")
    return jax.shard_map(
        by_device,
        mesh=found.current_mesh,
        in_specs=split,
        out_specs=split,
        axis_names={"context"},
        check_vma=False,
    )(x)


def rolled_layers(rows, x, number, chunk):
    return layers(rows, rolled(x), number, chunk)


@pytest.mark.parametrize("schedule", [pipeline_loss, one_f_one_b_gradients])
def test_a_stage_may_map_another_axis_by_hand(schedule):
    sizes = {"stage": STAGES, "context": 2}
    value, gradients = reference(1, rolled_layers)
    run = in_stages(Pipeline(first, rolled_layers, last), schedule, sizes)
    if schedule is pipeline_loss:
        run = jax.value_and_grad(run, has_aux=True)
    got = compiled(run)(*given(1))
    assert_close(
        got,
        (PipelineLoss(*value), gradients)
        if schedule is one_f_one_b_gradients
        else (value, gradients),
    )
