"""A step on fewer hosts has the gradients of the step on all of them, apart from rounding."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from programs import LLAMA, batch, loaded, placed_inputs, program, state_of

from graphtrain.api.checks.fallback import fallback
from graphtrain.config.schema import Batch, Config, Data, Loss, Mesh, Program, Run

MODEL = dataclasses.replace(LLAMA, layers=1, embed=48, mlp=96, vocab=96)  # multiples of 12
SIZES: dict[str, Any] = {"global_batch_size": 16, "seq_len": 16}
CASES: dict[str, dict[str, Any]] = {
    "one reduction per step": {
        "mesh": Mesh(data=4),
        "batch": Batch(**SIZES, microbatches=2, gradient_reduction="per_step"),
    },
    "isolated documents, chunked loss": {
        "mesh": Mesh(fsdp=4),
        "batch": Batch(**SIZES, cross_document_attention=False),
        "loss": Loss(z_loss=1e-3, chunk=8),
    },
}


def on_three(of: Program) -> Program:
    """The program that a run of four hosts has on three of them, here as devices of one."""
    hosts = dataclasses.replace(of, target="cpu:4x1")
    run = Run(directory="run", steps=1, data=Data(train="data"), fallback=(3,))
    settings = fallback(Config(program=hosts, run=run), 3).program.settings
    return dataclasses.replace(settings, target="cpu:3")


def padded(arrays: dict[str, np.ndarray], sizes: Batch) -> dict[str, np.ndarray]:
    """The same rows in the microbatches of fewer hosts, with empty rows after them."""
    shape = sizes.microbatches, -1, sizes.seq_len

    def arrange(array: np.ndarray) -> np.ndarray:
        rows = array.reshape(-1, sizes.seq_len)
        return np.pad(rows, ((0, sizes.padding_sequences), (0, 0))).reshape(shape)

    return {name: arrange(array) for name, array in arrays.items()}


def gradients(of: Program, arrays: dict[str, np.ndarray], state: Any) -> Any:
    step = loaded(of, "gradients")
    inputs = (placed_inputs(step, name, one) for name, one in (("state", state), ("batch", arrays)))
    return jax.device_get(step(*inputs))


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_a_padded_batch_on_three_hosts_are_those_on_four(case):
    full = program(target="cpu:4", model=MODEL, **CASES[case])
    fewer, arrays, state = on_three(full), batch(full), state_of(full)
    assert fewer.batch.padding_sequences == 2 and fewer.batch.microbatches > full.batch.microbatches
    expected = gradients(full, arrays, state)
    found = gradients(fewer, padded(arrays, fewer.batch), state)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    pairs = zip(*map(jax.tree.leaves, (found["gradients"], expected["gradients"])), strict=True)
    for one, other in pairs:
        assert np.abs(one - other).max() < 2e-6 * np.abs(other).max()
