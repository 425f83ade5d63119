"""Gradient accumulation whose layers add in place: its memory, and the numbers of plain sums."""

from importlib.util import find_spec

import jax
import numpy as np
import pytest
from programs import LLAMA, batch, lower, program, state_of
from unoptimized import OPTIONS

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, Model
from graphtrain.cost_model.memory import lower_bound, memory
from graphtrain.graphs.build import accumulate_gradients
from graphtrain.graphs.objectives import training_objective
from lowering.trees import flatten
from lowering.xla import backend as xla


def test_sums_equal_those_of_whole_gradients():
    of = program(model=LLAMA, batch=Batch(global_batch_size=8, seq_len=16, microbatches=4))
    made, state, tokens = resolve(of), state_of(of), batch(of)
    objective = training_objective(made, state, None, tokens)

    def whole_gradients(parameters):
        def total(parameters):
            microbatches = [jax.tree.map(lambda array, i=i: array[i], tokens) for i in range(4)]
            return sum(objective(parameters, one, i)[0] for i, one in enumerate(microbatches))

        return jax.grad(total)(parameters)

    expected = jax.jit(whole_gradients, compiler_options=OPTIONS)(state["parameters"])
    sums = jax.jit(lambda: accumulate_gradients(made, state, tokens)[0], compiler_options=OPTIONS)()
    for path, want in flatten(expected).items():
        np.testing.assert_allclose(flatten(sums)[path], want, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.skipif(not find_spec("jax_plugins"), reason="no jax_plugins")
def test_the_newest_gradient_of_all_layers_takes_no_memory():
    """With a second stack of gradients, the peak was 1.28 times the minimum."""
    of = program(
        target="h100:8",
        mesh=Mesh(data=8),
        model=Model(layers=8, embed=1024, heads=8, mlp=2816, vocab=1024),
        batch=Batch(global_batch_size=32, seq_len=512, microbatches=4),
    )
    made = resolve(of)
    peak = xla.compile(lower(of, "train")).record["memory"]["peak"]
    assert peak <= 1.15 * lower_bound(made)
    assert memory(made).peak == pytest.approx(peak, rel=0.1)
