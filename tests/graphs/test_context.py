"""Sequences split by position give the numbers of one device, by ring and by all-to-all."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params
from programs import GEMMA, GPT2, LLAMA, batch, loaded, placed_inputs, program, state_of
from test_parallel import assert_close, loss_and_gradients

from graphtrain.config.schema import Batch, Mesh, PipelineSettings
from graphtrain.models.attention import ring_blocks
from graphtrain.models.attention.ring import ring_attention
from graphtrain.models.attention.ring_order import axis_to_ring_order, positions
from graphtrain.models.attention.score_mods import ScoreTransform
from lowering.tracing.constrain import use_placement
from lowering.xla import backend as xla
from sharding_rules.errors import ShardingError
from sharding_rules.mesh import MeshShape
from sharding_rules.rules import Rules

BLOOM = dataclasses.replace(LLAMA, positions="alibi", norm="layer", activation="gelu")
MODELS = {"llama": LLAMA, "gpt2": GPT2, "bloom": BLOOM, "gemma": GEMMA}
RING, ULYSSES = ("data", "fsdp", "context", "tensor"), ("data", "fsdp", "ulysses", "tensor")
WAYS = {
    "ring 8": {"mesh": Mesh(context=8), "rules": RING},
    "ring 4": {"mesh": Mesh(data=2, context=4), "rules": RING},
    "ring 2": {"mesh": Mesh(data=4, context=2), "rules": RING},
    "ring, fsdp": {"mesh": Mesh(fsdp=2, context=4), "rules": RING},
    "ring, tensor": {"mesh": Mesh(data=2, context=2, tensor=2), "rules": RING},
    "ring, sequence": {"mesh": Mesh(context=4, tensor=2), "rules": (*RING, "sequence")},
    "ulysses": {"mesh": Mesh(data=2, context=4), "rules": ULYSSES},
    "ulysses, tensor": {"mesh": Mesh(fsdp=2, context=2, tensor=2), "rules": ULYSSES},
    "ulysses, sequence": {
        "mesh": Mesh(data=2, context=2, tensor=2),
        "rules": (*ULYSSES, "sequence"),
    },
}


CASES = [
    *(("llama", way) for way in WAYS),
    *(("gpt2", way) for way in ("ring 4", "ring, sequence", "ulysses")),
    *(("bloom", way) for way in ("ring, tensor", "ulysses, tensor")),
    *(("gemma", way) for way in ("ring 4", "ulysses, sequence")),
]


@pytest.mark.parametrize(("model", "way"), CASES, ids=map(" on ".join, CASES))
def test_loss_and_gradients_equal_those_of_one_device(model, way):
    assert_close(
        loss_and_gradients(program(model=MODELS[model], target="cpu:8", **WAYS[way])),
        loss_and_gradients(program(model=MODELS[model])),
    )


def test_tiles_of_queries_change_nothing(monkeypatch):
    """A chunk of 8 positions in tiles of 4, with key heads that groups of query heads share."""
    monkeypatch.setattr(ring_blocks, "RING_TILE", 4)
    sizes = Batch(global_batch_size=2, seq_len=32)
    alone = program(model=BLOOM, batch=sizes)
    split = program(model=BLOOM, batch=sizes, target="cpu:2", mesh=Mesh(context=2), rules=RING)
    assert_close(loss_and_gradients(split, batch(alone)), loss_and_gradients(alone))


def test_a_ring_inside_a_loop_by_hand_over_data():
    sizes = Batch(global_batch_size=8, seq_len=16, microbatches=2)
    alone = program(batch=sizes)
    split = program(
        batch=dataclasses.replace(sizes, gradient_reduction="per_step"),
        target="cpu:8",
        mesh=Mesh(data=2, context=2, tensor=2),
        rules=RING,
    )
    assert_close(loss_and_gradients(split, batch(alone)), loss_and_gradients(alone))


@pytest.mark.parametrize(
    ("schedule", "mesh", "model"),
    [
        ("gpipe", Mesh(stage=2, context=2, tensor=2), LLAMA),
        ("1f1b", Mesh(stage=2, context=2, tensor=2), LLAMA),
        ("1f1b", Mesh(stage=2, context=2, data=2), GEMMA),
    ],
    ids=["gpipe", "1f1b", "1f1b, windows"],
)
def test_a_ring_inside_the_stages_of_a_pipeline(schedule, mesh, model):
    sizes = Batch(global_batch_size=8, seq_len=16, microbatches=4)
    alone = program(model=model, batch=sizes)
    split = program(
        model=model,
        batch=sizes,
        target="cpu:8",
        mesh=mesh,
        rules=(*RING, "pipeline"),
        pipeline=PipelineSettings(schedule=schedule),
    )
    assert_close(loss_and_gradients(split, batch(alone)), loss_and_gradients(alone))


def test_a_ring_drops_the_same_in_the_stages_of_a_pipeline():
    sizes = Batch(global_batch_size=8, seq_len=16, microbatches=4)
    model = dataclasses.replace(LLAMA, dropout=0.2)
    ring = program(model=model, batch=sizes, target="cpu:2", mesh=Mesh(context=2), rules=RING)
    stages = program(
        model=model,
        batch=sizes,
        target="cpu:4",
        mesh=Mesh(stage=2, context=2),
        rules=(*RING, "pipeline"),
        pipeline=PipelineSettings(schedule="1f1b"),
    )
    assert_close(loss_and_gradients(stages), loss_and_gradients(ring))


def test_positions_are_in_the_order_of_the_tokens():
    mesh = xla.make_mesh(MeshShape({"context": 4}), jax.devices()[:4])
    with use_placement(mesh, Rules.load(["context"])):
        assert positions(24).tolist() == axis_to_ring_order(jnp.arange(24), 0).tolist()
        assert positions(16).tolist() == [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]


def test_evaluation_sums_the_same_losses():
    alone, split = program(), program(target="cpu:4", mesh=Mesh(context=4), rules=RING)
    inputs = {name: array[0] for name, array in batch(alone).items()}
    sums = []
    for of in (alone, split):
        evaluate = loaded(of, "evaluate")
        parameters = placed_inputs(evaluate, "parameters", state_of(of)["parameters"])
        metrics = evaluate(parameters, placed_inputs(evaluate, "batch", inputs))["metrics"]
        sums.append(float(metrics["loss_sum"]))
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)


def test_temporaries_of_a_ring_grow_as_the_length(monkeypatch):
    monkeypatch.setattr(ring_blocks, "RING_TILE", 32)

    def temporaries(length, **way):
        of = program(batch=Batch(global_batch_size=1, seq_len=length), **way)
        return loaded(of, "gradients").record["memory"]["temporaries"]

    ring = {"target": "cpu:2", "mesh": Mesh(context=2), "rules": RING}
    short, long = (temporaries(length, **ring) for length in (512, 2048))
    assert long < 5 * short
    assert temporaries(2048) > 10 * temporaries(512)  # whole scores: what the ring avoids


def test_every_device_of_a_ring_does_half_the_products():
    devices, length, heads, head_dim = 8, 64, 2, 4
    mesh = xla.make_mesh(MeshShape({"context": devices}), jax.devices()[:devices])
    array = jax.ShapeDtypeStruct((1, length, heads, head_dim), "float32")
    with use_placement(mesh, Rules.load(["context"])):
        run = partial(
            ring_attention, scoring=ScoreTransform(head_dim**-0.5), mesh_axes=("context",)
        )
        traced = jax.make_jaxpr(run)(*[array] * 3)
    whole = 2 * 2 * length * length * heads * head_dim
    share = devices * products(traced.jaxpr) / whole
    assert share == (2 * devices + 1) / (4 * devices)


def products(jaxpr):
    """Operations of all matrix products; a scan's body counts as often as it runs."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            lhs, out = equation.invars[0].aval, equation.outvars[0].aval
            total += 2 * out.size * math.prod(lhs.shape[axis] for axis in contracted)
        trips = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        total += trips * sum(products(inner) for inner in jaxprs_in_params(equation.params))
    return total


def test_a_length_that_does_not_balance_is_refused():
    of = program(
        target="cpu:8",
        mesh=Mesh(context=8),
        rules=RING,
        batch=Batch(global_batch_size=1, seq_len=24),
    )
    with pytest.raises(ShardingError, match="a sequence length that is a multiple of 16"):
        loaded(of, "train")
