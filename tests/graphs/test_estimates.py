"""Predicted collectives and FLOPs against those of the compiled step, without the machine."""

import dataclasses
import importlib.util

import pytest
from compared_collectives import compared_program, listed, sent
from programs import LLAMA, lower, program, unoptimized

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, PipelineSettings
from graphtrain.cost_model.compute import compiled_excess
from graphtrain.cost_model.traffic import bubble_of, predict_collectives
from lowering.hlo.collectives import Collective
from lowering.xla import backend as xla

ON_GPUS = (
    "data", "zero2", "zero1, per step", "fsdp", "fsdp, full remat", "tensor", "tensor and sequence",
    "tensor and sequence, chunks",
)  # fmt: skip
# All of them: tests/benchmarks.
ON_CPUS = (
    "fsdp", "cube and sequence", "context", "pipeline, vocabulary on stages", "experts",
    "pipeline and context, 1f1b, packed", "pipeline, interleaved", "dense layers in a pipeline",
    "multi-token prediction",
)  # fmt: skip


@pytest.mark.skipif(not importlib.util.find_spec("jax_plugins"), reason="needs the extra gpu")
@pytest.mark.parametrize("name", ON_GPUS)
def test_predicted_collectives_are_those_of_a_program_for_gpus(name):
    _compare(name, "h100:8", tolerance=0.001)


@pytest.mark.parametrize("name", ON_CPUS)
def test_predicted_collectives_are_those_of_a_program_for_cpus(name):
    _compare(name, "cpu:8", tolerance=0.01)


def _compare(name, target, tolerance):
    of = compared_program(name, target)
    record = xla.compile(unoptimized(lower(of, "train"))).record
    compiled = tuple(Collective.from_record(one) for one in record["collectives"])
    predicted = predict_collectives(resolve(of))
    assert listed(predicted) == listed(compiled)
    assert sent(predicted) == pytest.approx(sent(compiled), rel=tolerance)


@pytest.mark.parametrize(("schedule", "layers"), [("1f1b", 4), ("gpipe", 2)])
def test_estimated_flops_are_those_of_layers_that_stages_compute_again(schedule, layers):
    """With remat = "full" a stage computes its layers three times, one layer alone twice.

    The estimate has all products of a layer, the program not that of its output once more.
    """
    of = program(
        target="cpu:2",
        mesh=Mesh(stage=2),
        model=dataclasses.replace(LLAMA, layers=layers, embed=64, mlp=128, remat="full"),
        batch=Batch(global_batch_size=8, seq_len=64, microbatches=4),
        pipeline=PipelineSettings(schedule=schedule),
    )
    made, compiled = resolve(of), xla.compile(unoptimized(lower(of, "train"))).record["flops"]
    excess = compiled_excess(made, compiled, flash=False, bubble=bubble_of(made))
    assert excess == pytest.approx(0.95, abs=0.02)
