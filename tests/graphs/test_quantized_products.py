"""Products in fp8 and int8: what the compiler for a GPU makes of them, and their gradients."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
from programs import batch, loaded, lower, placed_inputs, program, state_of, stored

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, Model, PipelineSettings, Precision, Program
from graphtrain.cost_model.assessment import Assessment
from graphtrain.graphs.plan import plan_program
from graphtrain.planning.assess import estimate
from graphtrain.planning.quantized_products import products_as_json, products_line, with_products
from lowering.hlo.collectives import read
from lowering.trees import flatten

MODEL = Model(layers=3, embed=64, heads=4, kv_heads=2, head_dim=16, mlp=96, vocab=64, remat="none")
FP8, INT8 = Precision(compute="fp8"), Precision(compute="int8")
SMALL = Batch(global_batch_size=4, seq_len=16)


def planned(of: Program, products: Mapping[str, int]) -> Assessment:
    made = resolve(of)
    return with_products(estimate(made, plan_program(made)), products)


@pytest.mark.parametrize(
    ("precision", "call"),
    [
        (FP8, r'custom_call_target="__cublas\$lt\$matmul\$f8"'),
        (INT8, r'= \(s32\[.*custom_call_target="__cublas\$lt\$matmul"'),
    ],
    ids=["fp8", "int8"],
)
def test_the_plan_counts_the_calls_of_cublas_in_the_program_of_a_gpu(precision, call):
    of = program(model=MODEL, batch=SMALL, precision=precision, target="h100:1")
    lowered = lower(of, "train")
    text = lowered.handle.compile(compiler_options=lowered.options).as_text()
    plan = planned(of, read(text, lowered.plan.mesh).products)
    calls = sum(bool(re.search(call, line)) for line in text.splitlines())
    assert calls >= 14  # 5 products, some merged, and their two gradients each
    expected = {"fp8": 0, "int8": 0, "fell_back": {}} | {precision.matmul_dtype: calls * 3}
    assert products_as_json(plan) == expected  # each call is in a loop over three layers
    assert products_line(precision, plan) == [
        f"products in {precision.matmul_dtype}: {calls * 3} of {calls * 3} a step; excluded: "
        "head, experts, router, embedding (source: compiler)"
    ]
    assert not any("fell back" in finding for finding in plan.findings)


def gradients(of: Program, stored_for: Program | None = None) -> tuple[float, np.ndarray]:
    """Return the loss of a program's first step, and all its gradients in one vector.

    Args:
        of: The program.
        stored_for: Another one, in whose layout for pipeline stages the gradients are returned.
    """
    state, executable = state_of(of), loaded(of, "gradients")
    inputs = {"state": state, "batch": batch(of)}
    out = jax.device_get(executable(*(placed_inputs(executable, *one) for one in inputs.items())))
    found = out["gradients"] if stored_for is None else stored(stored_for, out["gradients"])
    return out["loss"], np.concatenate([np.ravel(g) for g in flatten(found).values()])


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("precision", [FP8, INT8], ids=["fp8 by tensor", "int8 by channel"])
def test_gradients_point_where_those_of_bfloat16_do(precision):
    loss, reference = gradients(program(model=MODEL, batch=SMALL))
    quantized_loss, quantized = gradients(program(model=MODEL, batch=SMALL, precision=precision))
    assert cosine(reference, quantized) > 0.99
    assert not np.array_equal(reference, quantized)
    assert quantized_loss == pytest.approx(loss, rel=1e-2)


def test_products_that_fell_back_are_named():
    of = program(model=MODEL, batch=SMALL, precision=FP8)  # CPUs do not multiply in fp8
    plan = planned(of, loaded(of, "gradients").record["products"])
    counts = products_as_json(plan)
    assert counts is not None and counts["fp8"] == 0
    names = {name.split(" ")[1] for name in counts["fell_back"]}
    assert names == {f"attention/{name}" for name in ("query", "key", "value", "output")} | {
        f"mlp/{name}" for name in ("gate", "up", "down")
    }
    total = sum(counts["fell_back"].values())
    assert total == 3 * 7 * MODEL.layers  # forward, and two gradients
    (finding,) = (one for one in plan.findings if "fell back" in one)
    assert finding.startswith(f"{total} of {total} products fell back to wider operands: f32 ")


def test_an_excluded_product_stays_in_the_dtype_of_the_model():
    names: tuple[Any, ...] = ("head", "query", "key", "value", "output", "gate", "up")
    for exclude, dots in ((names, 3), ((*names, "down"), 0)):
        precision = Precision(compute="fp8", exclude=exclude)
        text = lower(program(model=MODEL, batch=SMALL, precision=precision), "gradients").text
        found = [line for line in text.splitlines() if "dot_general" in line and "f8E" in line]
        assert len(found) == dots


UNEVEN = {
    "target": "cpu:2",
    "mesh": Mesh(stage=2),
    "batch": Batch(global_batch_size=4, seq_len=16, microbatches=2),
    "pipeline": PipelineSettings(schedule="gpipe", layers_per_stage=(2, 1)),
}
ALL = Precision(compute="fp8", exclude=())  # the LM head, too


ONE_F_ONE_B = {
    "target": "cpu:3",
    "mesh": Mesh(stage=3),
    "batch": Batch(global_batch_size=12, seq_len=18, microbatches=3),
    "pipeline": PipelineSettings(schedule="1f1b"),
}


# Sums in another order round otherwise in 8 bits. Stages of a pipeline divide the positions of the
# LM head, whose scale of a tensor is then one for each stage.
@pytest.mark.parametrize(
    ("precision", "settings", "near"),
    [
        (FP8, {"target": "cpu:8", "mesh": Mesh(data=2, fsdp=2, tensor=2)}, 0.999),
        (FP8, ONE_F_ONE_B, 0.999),
        (ALL, ONE_F_ONE_B, 0.998),
        (ALL, UNEVEN, 0.998),
        (dataclasses.replace(ALL, compute="int8"), UNEVEN, 0.999),
    ],
    ids=["cube", "1f1b", "1f1b head", "gpipe head", "gpipe int8 head"],
)
def test_a_mesh_has_the_gradients_of_one_device(precision, settings, near):
    of = program(**{"model": MODEL, "batch": SMALL} | settings, precision=precision)
    alone = program(model=MODEL, batch=of.batch)
    loss, whole = gradients(dataclasses.replace(alone, precision=precision), of)
    sharded_loss, sharded = gradients(of)
    assert sharded_loss == pytest.approx(loss, rel=1e-3)
    assert cosine(whole, sharded) > near
    wide_loss, wide = gradients(alone, of)
    assert sharded_loss == pytest.approx(wide_loss, rel=1e-2)
    assert cosine(wide, sharded) > 0.99
