"""Settings of the native decoder that contradict each other are refused, with what to change."""

import pytest
from pydantic import ValidationError

from graphtrain.config.schema import Model

SIZES = {"layers": 2, "embed": 32, "heads": 4, "mlp": 48, "vocab": 64}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"partial_rotary_factor": 0.4}, "rotates 3 of head_dim = 8 dimensions"),
        ({"partial_rotary_factor": 0.1}, "rotates 0 of head_dim = 8 dimensions"),
        ({"partial_rotary_factor": 1.5}, "less than or equal to 1"),
        (
            {"partial_rotary_factor": 0.5, "positions": "alibi"},
            'partial_rotary_factor is only for positions = "rope"; remove it',
        ),
    ],
)
def test_a_contradiction_is_refused(settings, told):
    with pytest.raises(ValidationError, match=told):
        Model(**SIZES, **settings)
