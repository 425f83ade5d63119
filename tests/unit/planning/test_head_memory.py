"""Estimated memory of the LM head's gradient, which some steps do not reduce first."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Loss, Mesh, Model, PipelineSettings, Program
from graphtrain.cost_model.head_memory import cast_embedding, pending_head_gradient
from graphtrain.cost_model.memory import memory
from graphtrain.cost_model.sizes import DeviceSizes
from graphtrain.cost_model.weights import shard_weights
from graphtrain.models.head_gradient import reduce_head_first, use_head_first
from graphtrain.models.head_gradient_support import reduces_head_first

MODEL = Model(layers=12, embed=1024, heads=16, mlp=4096, vocab=32_000, remat="full")
FSDP = Program(
    target="h100:8",
    mesh=Mesh(fsdp=8),
    rules=("data", "fsdp"),
    model=MODEL,
    batch=Batch(global_batch_size=64, seq_len=2048),
    loss=Loss(chunk=128),
)
PIPELINE = replace(
    FSDP,
    mesh=Mesh(stage=2, fsdp=4),
    rules=("data", "fsdp", "pipeline"),
    batch=Batch(global_batch_size=64, seq_len=2048, microbatches=4),
    pipeline=PipelineSettings(schedule="1f1b"),
    loss=Loss(chunk="none"),
)
PER_STEP = Batch(global_batch_size=64, seq_len=2048, microbatches=4, gradient_reduction="per_step")
AXES = ("embed", "vocab")
SUM = 4 * MODEL.embed * MODEL.vocab  # float32, unsharded over embed
LOGITS = 2 * 64 * 2048 * MODEL.vocab  # bfloat16, of all devices and microbatches


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (FSDP, 0),
        (replace(FSDP, target="cpu:8"), SUM),
        (replace(FSDP, mesh=Mesh(data=8), rules=("data", "zero1"), batch=PER_STEP), SUM),
        (PIPELINE, LOGITS / 4 / 4),
        (replace(PIPELINE, pipeline=PipelineSettings(schedule="circular")), 0),
    ],
    ids=["fsdp", "on CPUs", "per step", "1f1b", "circular"],
)
def test_gradients_that_are_not_reduced_first_wait(program, expected):
    of = resolve(program)
    assert pending_head_gradient(of, DeviceSizes.of(of), shard_weights(of)) == expected


@pytest.mark.parametrize(
    ("changes", "rows"),
    [({}, 32_000), ({"target": "h100:8"}, 0), ({"batch": FSDP.batch}, 0)],
    ids=["tpu", "gpu", "one microbatch"],
)
def test_tpus_cast_an_embedding_once_for_all_microbatches(changes, rows):
    batch = replace(FSDP.batch, microbatches=2)
    of = replace(FSDP, target="v5e:2x4", mesh=Mesh(data=8), batch=batch)
    made = resolve(replace(of, **changes))
    assert cast_embedding(made, shard_weights(made)) == 2 * rows * MODEL.embed


@pytest.mark.parametrize(
    ("program", "first"),
    [
        (FSDP, True),
        (replace(FSDP, target="cpu:8"), False),
        (replace(FSDP, mesh=Mesh(data=8), rules=("data", "zero1"), batch=PER_STEP), False),
        (replace(FSDP, batch=PER_STEP), True),  # without replicas, nothing is deferred
        (PIPELINE, False),
        (replace(PIPELINE, pipeline=PipelineSettings(schedule="circular")), False),
    ],
)
def test_the_head_is_reduced_first_outside_of_manual_steps(program, first):
    of = resolve(program)
    assert reduces_head_first(of) == first
    assert not reduces_head_first(replace(of, stands_for_imported=True))


@pytest.mark.parametrize("first", [True, False])
def test_the_gradient_of_the_head_waits_only_where_it_is_asked_for(first):
    def barriers(hidden, head):
        with use_head_first(first):
            return jnp.prod(jnp.stack([x.sum() for x in reduce_head_first(hidden, head, AXES)]))

    traced = jax.make_jaxpr(jax.grad(barriers, (0, 1)))(jnp.ones((1, 2, 3)), jnp.ones((3, 4)))
    assert ("optimization_barrier" in str(traced)) == first


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "chunk", "peak"),
    [
        ("1f1b", 1, "none", 1_930_000_000),
        ("1f1b", 1, 128, 1_563_000_000),
        ("circular", 2, 128, 1_563_000_000),
    ],
)
def test_memory_of_stages_with_fsdp_is_near_that_of_the_compiled_step(
    schedule, virtual_stages, chunk, peak
):
    """The peaks are XLA's, in three digits, with JAX 0.10.2."""
    pipeline = PipelineSettings(schedule=schedule, virtual_stages=virtual_stages)
    of = replace(PIPELINE, pipeline=pipeline, loss=Loss(chunk=chunk))
    assert memory(resolve(of)).peak == pytest.approx(peak, rel=0.03)
