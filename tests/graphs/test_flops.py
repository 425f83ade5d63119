"""Predicted FLOPs of a step beside those of the compiled one."""

import pytest

from graphtrain.compile import worker
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Adapter, Batch, MixtureOfExperts, Model, Program
from graphtrain.cost_model.compute import flops_by_part
from lowering.hlo.collectives import read

SIZES = {
    "layers": 2, "embed": 128, "heads": 4, "kv_heads": 4, "mlp": 256, "vocab": 512,
    "dtype": "float32", "remat": "none",
}  # fmt: skip


def mixture(capacity: float) -> Program:
    experts = MixtureOfExperts(experts=4, experts_per_token=2, capacity_factor=capacity)
    return step(model=Model(**SIZES, moe=experts))


def step(**settings) -> Program:
    return Program(
        target="cpu:1",
        **{"model": Model(**SIZES), "batch": Batch(global_batch_size=4, seq_len=128)} | settings,
    )


@pytest.mark.parametrize(
    "of",
    [mixture(1.0), mixture(4.0), step(), step(adapter=Adapter(rank=64, alpha=16))],
    ids=["capacity 1", "capacity 4", "dense", "LoRA"],
)
def test_predicted_operations_are_those_of_the_compiled_step(of):
    made = resolve(of)
    lowered = worker.lower(made, "train")
    text = lowered.handle.compile(compiler_options=lowered.options).as_text()
    counted = read(text, made.mesh).flops
    predicted = sum(part.computed for part in flops_by_part(made, flash=False, masked=False))
    assert predicted == pytest.approx(counted, rel=0.06)
