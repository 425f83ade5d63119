"""Cross-entropy in chunks: the numbers of all logits at once, which never exist."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compared_collectives import sent
from programs import CUBE, GEMMA, GPT2, batch, loaded, lower, placed_inputs, program, state_of
from test_parallel import loss_and_gradients

from graphtrain.config.schema import Adapter, Batch, Loss, Mesh, PipelineSettings
from graphtrain.models.chunk_losses import LossHead
from graphtrain.models.chunk_size import parts_of_chunk
from graphtrain.models.chunked_loss import chunked_cross_entropy
from graphtrain.models.unnormed import Unnormed
from lowering.hlo.collectives import Collective
from lowering.pipeline import one_f_one_b_loops
from lowering.tracing.summed_gradient import GradientStack, SummedGradient
from sharding_rules.arrays import ArraySpec
from sharding_rules.errors import ShardingError

LENGTH, CHUNK, VOCAB = 16, 4, 64
LAST = Batch(global_batch_size=8, seq_len=LENGTH, gradient_reduction="per_step")
SPLIT = {
    "data and fsdp": {"target": "cpu:8", "mesh": Mesh(data=2, fsdp=4)},
    "a ring": {"target": "cpu:8", "mesh": Mesh(data=4, context=2)},
    "reduced last": {"target": "cpu:8", "mesh": Mesh(data=4, fsdp=2), "batch": LAST},
}
TENSOR = {
    "sequence parallelism": CUBE,
    "tensor": {**CUBE, "rules": ("data", "fsdp", "tensor")},
}
WHOLE, CHUNKS = Loss(z_loss=0.1), Loss(z_loss=0.1, chunk=CHUNK)


def assert_close(got, want):
    assert got.keys() == want.keys()
    for path in want:
        np.testing.assert_allclose(got[path], want[path], rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("mesh", [*SPLIT, *TENSOR])
def test_loss_and_gradients_are_those_of_all_logits(mesh):
    split = (TENSOR | SPLIT)[mesh]
    assert_close(
        loss_and_gradients(program(loss=CHUNKS, **split)), loss_and_gradients(program(loss=WHOLE))
    )


def test_a_tied_and_sharded_head_of_two_losses_has_the_gradients_of_all_logits():
    model = dataclasses.replace(GEMMA, mtp_loss_weight=0.3)
    assert_close(
        loss_and_gradients(program(model=model, loss=CHUNKS, **CUBE)),
        loss_and_gradients(program(model=model, loss=WHOLE)),
    )


def test_each_chunk_is_normed_by_itself(monkeypatch):
    """With scales and biases, over shards of batch, embed and vocab."""
    want = loss_and_gradients(program(model=GPT2, loss=WHOLE))
    monkeypatch.delattr(Unnormed, "normed")
    assert_close(loss_and_gradients(program(model=GPT2, loss=CHUNKS, **CUBE)), want)


@pytest.mark.parametrize(
    ("schedule", "axis"), [("circular", "data"), ("1f1b", "data"), ("circular", "tensor")]
)
def test_a_pipeline_has_the_loss_and_gradients_of_all_logits(schedule, axis, monkeypatch):
    monkeypatch.setattr(one_f_one_b_loops, "on_cpu", lambda: False)  # with the barrier of GPUs
    stages = {
        "target": "cpu:4",
        "mesh": Mesh(**{axis: 2, "stage": 2}),
        "rules": ("data", "pipeline", "tensor", "sequence"),
        "batch": Batch(global_batch_size=8, seq_len=LENGTH, microbatches=2),
        "pipeline": PipelineSettings(schedule=schedule),
    }
    chunks, whole = (loss_and_gradients(program(loss=loss, **stages)) for loss in (CHUNKS, WHOLE))
    assert_close(chunks, whole)


@pytest.mark.parametrize("mesh", SPLIT)
def test_no_chunk_sends_anything(mesh):
    step = loaded(program(loss=CHUNKS, **SPLIT[mesh]), "gradients")
    assert step.record["collectives"]
    turns = LENGTH // CHUNK
    assert not [one for one in step.record["collectives"] if one.get("loops", ())[:1] == (turns,)]


@pytest.mark.parametrize("rules", TENSOR)
def test_chunks_of_a_sharded_vocabulary_send_no_more_than_all_logits(rules):
    chunks, whole = (
        [
            Collective.from_record(each)
            for each in loaded(program(loss=loss, **TENSOR[rules]), "gradients").record[
                "collectives"
            ]
        ]
        for loss in (CHUNKS, WHOLE)
    )
    assert sent(tuple(chunks)) <= sent(tuple(whole))
    turns, tokens_of_step = LENGTH // CHUNK, 2 * LENGTH
    of_chunks = [each for each in chunks if each.loops[:1] == (turns,)]
    assert {each.op for each in of_chunks} == {"all-reduce"}
    assert sum(each.count * each.bytes for each in of_chunks) == 3 * 4 * tokens_of_step


def test_all_logits_never_exist():
    def most_rows(loss):
        of = program(loss=loss)
        text = lower(of, "gradients").text
        shapes = re.findall(rf"tensor<([\dx]+)x{VOCAB}xf32>", text)
        return max(math.prod(map(int, shape.split("x"))) for shape in shapes)

    assert (most_rows(WHOLE), most_rows(CHUNKS)) == (8 * LENGTH, 8 * CHUNK)


def test_evaluation_with_a_tied_head_and_capped_scores_has_the_same_loss():
    losses = []
    for loss in (WHOLE, CHUNKS):
        of = program(model=GEMMA, loss=loss)
        evaluate = loaded(of, "evaluate")
        inputs = {name: array[0] for name, array in batch(of).items()}
        weights = placed_inputs(evaluate, "parameters", state_of(of)["parameters"])
        found = evaluate(weights, placed_inputs(evaluate, "batch", inputs))
        losses.append(float(found["metrics"]["loss_sum"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_a_frozen_head_gets_no_gradient():
    adapter = Adapter(rank=2, alpha=4.0)
    flops = [
        loaded(program(loss=loss, adapter=adapter), "gradients").record["flops"]
        for loss in (WHOLE, CHUNKS)
    ]
    assert flops[1] == flops[0]


@pytest.mark.parametrize(
    ("chunk", "length", "parts", "blocks"), [(2, 6, 1, 1), (512, 1024, 4, 1), (6, 6, 1, 7)]
)
def test_sums_and_gradients_are_those_of_float64(chunk, length, parts, blocks):
    assert parts_of_chunk(2, chunk) == parts
    scored = LossHead(chunk=chunk, tied=True, cap=3.0, z_loss=0.1, blocks=blocks)
    random = np.random.default_rng(0)
    hidden, head = random.normal(size=(2, length, 5)), random.normal(size=(5, 7))
    targets, weights = random.integers(0, 7, (2, length)), random.random((2, length))
    weights[0, :3] = 0

    def want(hidden, head):
        scores = 3.0 * jnp.tanh(hidden @ head / 3.0)
        log_z = jax.nn.logsumexp(scores, -1)
        losses = log_z - jnp.take_along_axis(scores, targets[..., None], -1)[..., 0]
        return 2.0 * ((losses + 0.1 * log_z**2) * weights).sum()

    def got(hidden, head):
        given = jnp.int32(targets), jnp.float32(weights)
        return 2.0 * chunked_cross_entropy(hidden, head.T, *given, scored)[0]

    with jax.enable_x64(True):
        expected = jax.jit(jax.value_and_grad(want, (0, 1)))(hidden, head)
    found = jax.jit(jax.value_and_grad(got, (0, 1)))(jnp.float32(hidden), jnp.float32(head))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # A sum whose terms cancel is as exact as its terms; processors add in other orders.
        rounding = np.finfo(np.float32).eps * np.abs(b).max()
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6 + rounding)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_the_gradient_of_the_head_is_added_to_earlier_ones(factor):
    """It cannot be if the loss is multiplied: the earlier ones would be, too."""
    scored = LossHead(chunk=2, tied=False, cap=None, z_loss=0.1)
    hidden, head = jnp.linspace(-1, 1, 40).reshape(2, 4, 5), jnp.ones((5, 7)).cumsum(1) / 7
    targets, weights, sums = jnp.ones((2, 4), jnp.int32), jnp.ones((2, 4)), jnp.full((5, 7), 3.0)
    stack = GradientStack(ArraySpec((5, 7), ("embed", "vocab")), "optimizer", has_sums=True)

    def loss(head):
        return factor * chunked_cross_entropy(hidden, head, targets, weights, scored)[0]

    added = jax.grad(lambda sums: loss(SummedGradient(head, sums, None, stack)))(sums)
    expected = sums + jax.grad(loss)(head) if factor == 1 else np.full((5, 7), np.nan)
    np.testing.assert_allclose(added, expected, rtol=1e-6)


def test_a_chunk_divides_what_a_device_has_of_a_sequence():
    of = program(loss=Loss(chunk=16), **SPLIT["a ring"])
    with pytest.raises(ShardingError, match=r"chunk = 16 does not divide the 8 positions"):
        loaded(of, "gradients")


def test_a_chunk_divides_a_sequence():
    with pytest.raises(ValueError, match="seq_len = 16 is not a multiple of loss"):
        program(loss=Loss(chunk=5))


def test_preferences_have_no_chunks():
    with pytest.raises(ValueError, match="chunk is only for kind"):
        dataclasses.replace(CHUNKS, z_loss=0.0, kind="dpo")
