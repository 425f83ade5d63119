"""Costs of a run with phases: each trains on its tokens at its own speed, on every target."""

import pytest

from graphtrain.cache import Cache
from graphtrain.planning.answer import answer
from graphtrain.planning.costs import Workload
from graphtrain.planning.targets import compare_targets

PHASE = "program.phase=[{until=900, global_batch_size=4, seq_len=128}]"
STEPS = "run.steps=1000"
FIRST, LAST = 4 * 128, 16 * 512  # tokens of a step
TOKENS = 900 * FIRST + 100 * LAST


def test_days_are_those_of_the_steps_of_all_phases(vary, tmp_path):
    (row,) = compare_targets(
        ["h100:4"],
        lambda change: vary([STEPS, PHASE, *change]),
        Cache(tmp_path),
        Workload(TOKENS),
        compile=False,
    )
    first, last = (one.assessment.time.total for one in row.phases)
    seconds = 900 * first + 100 * last
    assert row.cost.days == pytest.approx(seconds / 86_400)
    assert row.cost.tokens_per_second == pytest.approx(TOKENS / seconds)
    alone = TOKENS / LAST * last
    assert abs(seconds / alone - 1) > 0.1  # the last phase alone would say something else


def test_the_memory_of_a_target_is_that_of_the_largest_phase(vary, tmp_path):
    changes = ["program.phase=[{until=1, global_batch_size=64}]", "run.steps=2"]
    (row,) = compare_targets(
        ["v5e:2x2"],
        lambda change: vary([*changes, *change]),
        Cache(tmp_path),
        Workload(),
        compile=False,
    )
    assert row.assessment and row.largest
    assert row.largest is row.phases[0].assessment
    assert row.largest.memory.peak > row.assessment.memory.peak


def test_an_earlier_phase_that_does_not_fit_is_named(vary, tmp_path):
    def planned(change=()):
        phase = "program.phase=[{until=1, global_batch_size=8192}]"
        return vary(["program.target=v5e:2x2", phase, "run.steps=2", *change])

    found = answer(planned(), planned, Cache(tmp_path), compile=False)
    assert not found.fits and found.assessment.memory.fits
    assert "phase 1 does not fit v5e:2x2: peak " in str(found)
