"""Estimated memory of steps on TPUs, beside that of the same steps on GPUs."""

from dataclasses import replace

import pytest

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, Model, Program
from graphtrain.cost_model.memory import memory

MODEL = Model(layers=8, embed=1024, heads=16, kv_heads=4, mlp=2816, vocab=32_000, remat="dots")
ON_TPUS = Program(
    target="v5e:2x4",
    mesh=Mesh(data=8),
    rules=("data",),
    model=MODEL,
    batch=Batch(global_batch_size=32, seq_len=2048),
)


def test_heads_of_64_are_saved_without_padding():
    on_gpus = replace(ON_TPUS, target="h100:8")
    estimates = memory(resolve(ON_TPUS)), memory(resolve(on_gpus))
    assert estimates[0].activations == estimates[1].activations


@pytest.mark.parametrize(
    ("program", "peak"),
    [
        (ON_TPUS, 3_958_000_000),
        (replace(ON_TPUS, model=replace(MODEL, remat="full")), 2_708_000_000),
        (replace(ON_TPUS, mesh=Mesh(fsdp=8), rules=("fsdp",)), 1_998_000_000),
    ],
    ids=["dots", "full", "fsdp"],
)
def test_estimates_are_near_the_peaks_that_xla_plans_for(program, peak):
    """The peaks are those of libtpu 0.0.42.1 with JAX 0.10.2."""
    assert memory(resolve(program)).peak == pytest.approx(peak, rel=0.08)
