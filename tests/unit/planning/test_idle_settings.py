"""Findings about settings that do nothing on a mesh, machine or model."""

import pytest

from graphtrain.planning.assess import estimate

H100 = ["program.target=h100:8", "program.model.head_dim=64"]
LORA = "program.adapter={rank=%s, alpha=16.0}"
FROM = "run.init_from=weights"  # not read by an estimate
MOE = "program.model.moe={experts=8, experts_per_token=2, capacity_factor=%s}"
RING = ["program.target=h100:8", 'program.rules=["context"]', "program.mesh={context=8}"]
STAGES = [*H100, 'program.rules=["data", "pipeline"]', "program.batch.microbatches=4"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ([*H100, 'program.pipeline.schedule="1f1b"'], "mesh.stage is 1"),
        ([*H100, "program.pipeline.virtual_stages=2"], "mesh.stage is 1"),
        ([*H100, "program.mesh={expert=8}"], "mesh.expert = 8 has no experts"),
        ([*H100, FROM, LORA % 100_000], "adapter.rank = 100000 is not below the model's width"),
        ([*H100, MOE % 5], "4 drops no token"),
        ([*H100, MOE % 0.75], "drops at least 25% of the choices"),
        (["program.target=a100:8", "program.precision.compute=fp8"], "no speed of such products"),
        ([*RING, "program.model.sliding_window=64"], "sliding_window = 64 takes as long"),
        (
            [*STAGES, "program.mesh={stage=4, data=2}", "program.model.layers=6"],
            "compute 8 layers for the 6 that they have",
        ),
        (
            [
                *STAGES,
                "program.mesh={stage=4, data=2}",
                'program.batch.gradient_reduction="per_step"',
            ],
            'gradient_reduction = "per_step" has no effect in a pipeline',
        ),
    ],
)
def test_a_setting_without_effect_is_a_finding(vary, settings, named):
    assert any(named in text for text in estimate(vary(settings)).findings)


@pytest.mark.parametrize(
    "settings",
    [
        [*H100, FROM, LORA % 8],
        [*H100, MOE % 4],
        ["program.target=h100:8", "program.model.head_dim=64", "program.precision.compute=fp8"],
        [*RING, "program.model.sliding_window=512"],  # the sequence's length: no window
        [*STAGES, "program.mesh={stage=4, data=2}", "program.model.layers=8"],
        [*STAGES, "program.mesh={stage=4, data=2}", 'program.pipeline.schedule="1f1b"'],
    ],
)
def test_a_setting_with_its_effect_is_none(vary, settings):
    assert estimate(vary(settings)).findings == ()
