"""Blame: good programs have no flags, bad ones say which lines disagree."""

import dataclasses

import jax
import pytest
from programs import LLAMA, lower, program, unoptimized

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, PipelineSettings
from graphtrain.models.decoder import Decoder
from graphtrain.models.matmul import dot
from graphtrain.models.mlp import MLP
from graphtrain.models.projection import project
from graphtrain.planning.collective_origins import explain_collectives, unexplained
from lowering.errors import LoweringError
from lowering.hlo.collectives import ProgramFacts
from lowering.tracing.constrain import constrain
from lowering.xla import backend as xla

MODEL = dataclasses.replace(LLAMA, layers=4, kv_heads=4, remat="dots")
ACCUMULATED = {"batch": Batch(global_batch_size=16, seq_len=64, microbatches=2)}
PIPELINED = {"batch": Batch(global_batch_size=16, seq_len=64, microbatches=4)}
GOOD = {
    "data": (("data",), {"data": 8}, {}),
    "data, reduced last": (
        ("data",),
        {"data": 8},
        {
            "batch": Batch(
                global_batch_size=16, seq_len=64, microbatches=2, gradient_reduction="per_step"
            )
        },
    ),
    "zero1": (("zero1",), {"data": 8}, {}),
    "zero2": (("zero2",), {"data": 8}, ACCUMULATED),
    "fsdp": (("fsdp",), {"fsdp": 8}, ACCUMULATED),
    "tensor": (("data", "tensor"), {"data": 2, "tensor": 4}, {}),
    "sequence": (("data", "tensor", "sequence"), {"data": 2, "tensor": 4}, {}),
    "cube": (
        ("data", "fsdp", "tensor", "sequence"),
        {"data": 2, "fsdp": 2, "tensor": 2},
        ACCUMULATED,
    ),
    "context": (("data", "context"), {"data": 2, "context": 4}, {}),
    "ulysses": (("data", "ulysses"), {"data": 2, "context": 4}, {}),
    "pipeline": (("data", "pipeline"), {"data": 4, "stage": 2}, PIPELINED),
    "pipeline, 1f1b": (
        ("data", "pipeline"),
        {"data": 4, "stage": 2},
        PIPELINED | {"pipeline": PipelineSettings(schedule="1f1b")},
    ),
    # Sums of single layers, in as many ticks as there are microbatches.
    "pipeline, interleaved": (
        ("data", "pipeline"),
        {"data": 2, "stage": 4},
        {
            "batch": dataclasses.replace(
                PIPELINED["batch"], seq_len=128, gradient_reduction="per_step"
            ),
            "model": dataclasses.replace(MODEL, layers=32),
            "pipeline": PipelineSettings(schedule="1f1b", virtual_stages=2),
        },
    ),
}
ON_CPU = ("zero2", "cube", "pipeline, interleaved")
ON_TPU = [name for name in GOOD if name != "pipeline, interleaved"]
TENSOR = {"rules": ("data", "tensor"), "mesh": Mesh(data=2, tensor=4)}


def causes(target, **settings):
    """Why each collective of a training step is in its compiled program."""
    defaults = {"model": MODEL, "batch": Batch(global_batch_size=16, seq_len=64)}
    of = program(target=target, **defaults | settings)
    try:
        lowered = lower(of, "train")
    except LoweringError as error:
        pytest.skip(str(error))
    record = xla.compile(unoptimized(lowered)).record
    assert record["unknown_loops"] == 0
    return explain_collectives(
        resolve(of),
        lowered.plan,
        ProgramFacts.from_record(record).collectives,
        annotations=record["annotations"],
        bytes_per_second=dict.fromkeys(of.mesh.__dict__, 1e9),
    )


@pytest.mark.parametrize(
    ("name", "target"),
    [*((name, "cpu:8") for name in ON_CPU), *((name, "v5e:2x4") for name in ON_TPU)],
)
def test_the_strategies_explain_every_collective(name, target):
    rules, mesh, settings = GOOD[name]
    found = causes(target, rules=rules, mesh=Mesh(**mesh), **settings)
    assert found
    assert [cause.explanation for cause in unexplained(found)] == []
    assert all(cause.rule and cause.strategy for cause in found)
    assert {strategy for cause in found for strategy in cause.strategy.split(" + ")} <= set(rules)


def test_a_gathered_weight_names_its_array_rule_pass_and_time():
    found = causes("cpu:8", rules=("fsdp",), mesh=Mesh(fsdp=8))
    (down,) = [
        cause
        for cause in found
        if cause.array == "layers/mlp/down"
        and cause.collective.op == "all-gather"
        and "forward" in cause.explanation
    ]
    assert (down.rule, down.strategy) == ("parameters.embed = fsdp", "fsdp")
    assert down.collective.loops == (MODEL.layers,)
    assert down.seconds == pytest.approx(4 * 7 / 8 * MODEL.mlp * MODEL.embed * 4 / 1e9)
    assert (
        "layers/mlp/down is gathered over fsdp in the forward pass (4 x 6.14 kB" in down.explanation
    )


def products(mlp, x):
    """What the MLP of the model does up to the activation."""
    x = constrain(x, "batch", "seq", "embed")
    up = constrain(project(mlp, "up", "bse,em->bsm", x), "batch", "seq", "mlp")
    gate = constrain(project(mlp, "gate", "bse,em->bsm", x), "batch", "seq", "mlp")
    return jax.nn.silu(gate) * up


def whole_batch(mlp, x):
    with jax.named_scope("mlp"):
        hidden = constrain(products(mlp, x), None, "seq", "mlp")
        return project(mlp, "down", "bsm,me->bse", hidden)


def whole_width(mlp, x):
    with jax.named_scope("mlp"):
        hidden = constrain(products(mlp, x), "batch", "seq", None)
        return project(mlp, "down", "bsm,me->bse", hidden)


def line(function, offset):
    return f"tests/graphs/test_blame.py:{function.__code__.co_firstlineno + offset}"


@pytest.mark.parametrize("target", ["cpu:8", "v5e:2x4"])
@pytest.mark.parametrize(
    ("bad", "axis", "said"),
    [(whole_batch, "data", "None, 'seq', 'mlp'"), (whole_width, "tensor", "'batch', 'seq', None")],
)
def test_annotations_that_disagree_are_both_named(bad, axis, said, target, monkeypatch):
    monkeypatch.setattr(MLP, "__call__", bad)
    flags = [
        cause for cause in unexplained(causes(target, **TENSOR)) if "disagree" in cause.explanation
    ]
    assert flags
    assert {cause.collective.axes for cause in flags} == {(axis,)}
    assert not any(cause.explained or cause.rule for cause in flags)
    for cause in flags:
        assert f"an involuntary full rematerialization: no rule replicates it over {axis}" in (
            cause.explanation
        )
        assert f"constrain({said}) at {line(bad, 2)}" in cause.explanation
        assert f"constrain('batch', 'seq', 'mlp') at {line(products, 4)}" in cause.explanation


def test_a_weight_gathered_where_its_product_should_be_split_is_flagged(monkeypatch):
    monkeypatch.setattr(MLP, "__call__", whole_width)
    sentences = [cause.explanation for cause in unexplained(causes("cpu:8", **TENSOR))]
    weights = [sentence for sentence in sentences if "no rule gathers weights" in sentence]
    assert weights
    for weight in weights:
        assert weight.startswith(f"{line(whole_width, 3)}: layers/mlp/down is gathered over tensor")
        assert "activations.mlp = tensor also splits their products" in weight


@pytest.mark.parametrize("target", ["cpu:8", "v5e:2x4"])
def test_scores_gathered_over_the_vocabulary_are_flagged(target, monkeypatch):
    def unembed(decoder, hidden):
        x = constrain(hidden, "batch", "seq", "embed")
        with jax.named_scope("head"):
            scores = dot("bse,ev->bsv", x, decoder.head[...], jax.numpy.float32)
            scores = constrain(scores, "batch", "seq", "vocab")
            return constrain(scores, "batch", "seq", None)

    monkeypatch.setattr(Decoder, "unembed", unembed)
    (cause,) = unexplained(causes(target, **TENSOR))
    assert cause.collective.source == line(unembed, 5)
    assert "the logits are replicated over tensor" in cause.explanation
    assert 'constrain(scores, "batch", "seq", "vocab")' in cause.explanation
