"""Settings of the native decoder that contradict each other are refused, with what to change."""

import pytest
from pydantic import ValidationError

from graphtrain.config.schema import Batch, MixtureOfExperts, Model, Optimizer, Program

SIZES = {"layers": 2, "embed": 32, "heads": 4, "mlp": 48, "vocab": 64}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"groups": 4}, "groups and groups_per_token belong together"),
        ({"groups": 3, "groups_per_token": 1}, "experts = 8 is not a multiple of groups = 3"),
        ({"groups": 8, "groups_per_token": 1}, "at least 2 experts in each"),
        ({"groups": 4, "groups_per_token": 5}, "must be at most groups = 4"),
        (
            {"groups": 4, "groups_per_token": 1, "experts_per_token": 3},
            "enough for experts_per_token = 3 experts",
        ),
    ],
)
def test_groups_of_experts_that_do_not_fit_are_refused(settings, told):
    with pytest.raises(ValidationError, match=told):
        MixtureOfExperts(experts=8, **settings)


def test_an_average_of_weights_has_no_bias_that_a_step_updates():
    model = Model(**SIZES, moe=MixtureOfExperts(experts=4, bias_update_rate=0.001))
    settings = {"batch": Batch(global_batch_size=1, seq_len=8)}
    with pytest.raises(ValidationError, match="or set bias_update_rate = 0"):
        Program(model=model, optimizer=Optimizer(kind="schedule_free"), **settings)


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
