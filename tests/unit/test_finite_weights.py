import jax.numpy as jnp
import pytest

from graphtrain.errors import TrainingError
from graphtrain.run.finite_weights import check_finite_weights

MASK = jnp.asarray([0.0, -jnp.inf])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_elements_that_are_not_finite_are_counted_by_array(dtype):
    broken = jnp.asarray([[1.0, jnp.nan], [jnp.inf, 2.0]], dtype)
    text = "step 7 made weights that are not finite, though its loss was: 2 elements of mlp/up; "
    with pytest.raises(TrainingError, match=f"{text}.*last good checkpoint: run/checkpoints/4"):
        check_finite_weights({"mlp": {"up": broken}}, 7, lambda: "run/checkpoints/4")


def test_constants_of_an_imported_model_may_be_infinite():
    weights = {"mask": MASK, "count": jnp.asarray(3), "up": jnp.ones(2)}
    check_finite_weights(weights, 7, lambda: "none", has_constants=True)
    with pytest.raises(TrainingError, match="1 elements of mask"):
        check_finite_weights(weights, 7, lambda: "none")
