"""Predicted traffic against what the compiler of a machine that is not here makes of it."""

import importlib.util
from dataclasses import replace

import pytest
from programs import lower, program

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, Model
from graphtrain.cost_model.traffic import predict_collectives
from lowering.hlo.collectives import Collective
from lowering.xla import backend as xla

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("jax_plugins"), reason="needs the extra gpu"
)
MODEL = Model(layers=4, embed=512, heads=8, mlp=1024, vocab=4096)
CUBE = ("data", "fsdp", "tensor", "sequence")
CASES = {
    "data": (("data",), Mesh(data=8), 1, "per_microbatch"),
    "zero2": (("zero2",), Mesh(data=8), 2, "per_microbatch"),
    "zero1, reduced last": (("zero1",), Mesh(data=8), 2, "per_step"),
    "fsdp": (("fsdp",), Mesh(fsdp=8), 1, "per_microbatch"),
    "fsdp, full remat": (("fsdp",), Mesh(fsdp=8), 1, "per_microbatch", "full"),
    "tensor": (("tensor",), Mesh(tensor=8), 1, "per_microbatch"),
    "tensor and sequence": (CUBE, Mesh(tensor=8), 1, "per_microbatch"),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    rules, mesh, microbatches, reduction, *remat = CASES[request.param]
    batch = Batch(
        global_batch_size=32, seq_len=256, microbatches=microbatches, gradient_reduction=reduction
    )
    model = replace(MODEL, remat=remat[0]) if remat else MODEL
    of = program(target="h100:8", model=model, rules=rules, mesh=mesh, batch=batch)
    return of, xla.compile(lower(of, "train")).record


def sent(collectives):
    return sum(one.wire_bytes_per_step for one in collectives)


def test_predicted_bytes_on_the_wire_are_those_of_the_program(case):
    of, record = case
    read = sent(Collective.from_record(one) for one in record["collectives"])
    assert sent(predict_collectives(resolve(of))) == pytest.approx(read, rel=0.03)
