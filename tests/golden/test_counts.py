"""A regression guard that is not a timer: what programs are made of, as it was reviewed."""

import jax
import pytest
from counts import CONFIGS, count, difference, of_stablehlo, render

UPDATE = "python -m pytest tests/golden --update-golden"


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_training_step_is_made_of_what_it_was_made_of(config, pytestconfig):
    if config.missing:
        pytest.skip(f"{config.missing} is not installed")
    counted = count(config)
    if pytestconfig.getoption("update_golden"):
        config.file.parent.mkdir(exist_ok=True)
        config.file.write_text(render(counted))
    assert config.file.exists(), f"no counts for jax {jax.__version__}; run: {UPDATE}"
    changed = difference(config, counted)
    assert not changed, (
        f"{config.file.name} of jax {jax.__version__}:\n{changed}\nIf intended, run: {UPDATE}"
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
