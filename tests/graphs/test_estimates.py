"""Predicted collectives against those that compilers make of the step, without the machine."""

import importlib.util

import pytest
from compared_collectives import compared_program, listed, sent
from programs import lower, unoptimized

from graphtrain.config.resolve import resolve
from graphtrain.cost_model.traffic import predict_collectives
from lowering.hlo.collectives import Collective
from lowering.xla import backend as xla

ON_GPUS = (
    "data", "zero2", "zero1, per step", "fsdp", "fsdp, full remat", "tensor", "tensor and sequence",
)  # fmt: skip
# All of them: tests/benchmarks.
ON_CPUS = (
    "fsdp", "cube and sequence", "context", "pipeline, vocabulary on stages", "experts",
    "pipeline and context, 1f1b", "pipeline, interleaved",
)  # fmt: skip


@pytest.mark.skipif(not importlib.util.find_spec("jax_plugins"), reason="needs the extra gpu")
@pytest.mark.parametrize("name", ON_GPUS)
def test_predicted_collectives_are_those_of_a_program_for_gpus(name):
    _compare(name, "h100:8", tolerance=0.001)


@pytest.mark.parametrize("name", ON_CPUS)
def test_predicted_collectives_are_those_of_a_program_for_cpus(name):
    _compare(name, "cpu:8", tolerance=0.01)


def _compare(name, target, tolerance):
    program = compared_program(name, target)
    record = xla.compile(unoptimized(lower(program, "train"))).record
    compiled = tuple(Collective.from_record(one) for one in record["collectives"])
    predicted = predict_collectives(resolve(program))
    assert listed(predicted) == listed(compiled)
    assert sent(predicted) == pytest.approx(sent(compiled), rel=tolerance)
