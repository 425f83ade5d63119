"""A regression guard that is not a timer: what programs are made of, as it was reviewed."""

import jax
import pytest
from counts import CONFIGS, count, difference, of_stablehlo


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_training_step_is_made_of_what_it_was_made_of(config):
    if config.missing:
        pytest.skip(f"{config.missing} is not installed")
    if not config.file.exists():
        pytest.skip(f"no counts for jax {jax.__version__}: run python tests/golden/write.py")
    changed = difference(config, count(config))
    assert not changed, (
        f"{config.file.name} of jax {jax.__version__}:\n{changed}\n"
        "If this is meant, run: python tests/golden/write.py"
    )


def test_dots_are_counted_by_dtype_and_the_largest_array_is_told():
    text = """
    %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x2xbf16>) -> tensor<4x2xf32>
    %1 = stablehlo.transpose %0, dims = [1, 0] : (tensor<4x2xf32>) -> tensor<2x4xf32>
    """  # noqa: E501
    counted = of_stablehlo(text)
    assert counted["dot bf16 x bf16 to f32"] == counted["transpose"] == 1
    assert counted["instructions"] == 2
    assert (counted["largest array"], counted["bytes of the largest array"]) == ("4x8xbf16", 64)
