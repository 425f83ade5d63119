"""Products of blocks of rows with their expert's matrix: values, gradients, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from graphtrain.models.dropless import ExpertWeight, dropless_experts
from graphtrain.models.grouped_matmul_support import rows_of_block


@pytest.mark.parametrize(
    ("choices", "experts", "rows"),
    [(256, 4, 8), (8192, 8, 128), (10**6, 8, 128), (2000, 8, 16), (255, 4, 0), (2, 64, 0)],
)
def test_padding_is_at_most_an_eighth_of_the_choices(choices, experts, rows):
    assert rows_of_block(choices, experts) == rows
    assert rows * experts <= choices / 8


def experts_output(loops, arrays, experts):
    x, shares, gate, up, down, bias = arrays
    weights = [ExpertWeight(gate), ExpertWeight(up)]

    def combine(products):
        return jax.nn.silu(products[0]) * products[1]

    return dropless_experts(
        combine, x, shares, experts, weights, ExpertWeight(down), [bias, -bias], loops
    )


@pytest.mark.parametrize("chosen", ["all", "one"])
def test_loops_have_the_values_and_gradients_of_the_ragged_product(chosen):
    random = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    tokens, width, mlp, count = 192, 12, 20, 4
    arrays = (
        *(draw(tokens, 1, width), draw(tokens, 1, 2), draw(count, width, mlp)),
        *(draw(count, width, mlp), draw(count, mlp, width), draw(count, mlp)),
    )
    experts = jnp.asarray(random.integers(0, count, (tokens, 1, 2)), jnp.int32)
    if chosen == "one":  # others have no block
        experts = jnp.full_like(experts, 2)

    def total(loops, arrays):
        out = experts_output(loops, arrays, experts)
        return (out * jnp.cos(jnp.arange(width))).sum(), out

    found, expected = (
        jax.jit(jax.value_and_grad(lambda arrays, loops=loops: total(loops, arrays), has_aux=True))(
            arrays
        )
        for loops in (True, False)
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * float(jnp.abs(other).max()))


def test_a_loop_multiplies_rows_by_their_expert_alone():
    """The number of products is that of the choices, with their padding."""
    tokens, width, count = 1024, 16, 8
    x, shares = jnp.ones((tokens, 1, width)), jnp.ones((tokens, 1, 1))
    experts = jnp.zeros((tokens, 1, 1), jnp.int32)
    weights = jnp.ones((count, width, width))
    arrays = (x, shares, weights, weights, weights, jnp.ones((count, width)))
    text = str(jax.make_jaxpr(lambda arrays: experts_output(True, arrays, experts))(arrays))
    assert "ragged_dot" not in text
    assert f"f32[{1024 // 16 + 8},16,16]" in text  # blocks of 16 rows, one more for each expert
