"""Options of `graphtrain generate` and `chat`, and settings of serving, that are wrong."""

import pytest
from in_process import graphtrain

from graphtrain.api.generation import fixed_step
from graphtrain.checkpoints import steps
from graphtrain.config.schema import Serve


def test_a_number_without_limits_is_shown_without_a_range():
    out = graphtrain("generate", "--help").out
    assert "--length-penalty FLOAT" in out and "None" not in out
    outcome = graphtrain("generate", "a.toml", "a", "--length-penalty", "nan")
    assert outcome.status == 2 and "not a finite number" in outcome.err


def test_a_run_that_has_not_begun_cannot_be_watched_by_its_directory(tmp_path):
    outcome = graphtrain("generate", str(tmp_path / "run"), "a", "--watch")
    assert outcome.status == 2
    assert "run does not exist; a run makes its directory when it begins, so start it" in (
        outcome.err
    )


def test_sizes_of_prefill_are_named_or_increase():
    with pytest.raises(ValueError, match=r"prefill = \[\]: name at least one size; the default is"):
        Serve(prefill=())
    with pytest.raises(ValueError, match=r"prefill = \[64, 32\]: sizes must increase"):
        Serve(prefill=(64, 32))


@pytest.mark.parametrize("step, fixed", [("last", 8), ("best", 4), (2, 2)])
def test_the_checkpoint_of_a_server_with_adapters_is_chosen_once(monkeypatch, step, fixed):
    monkeypatch.setattr(steps, "saved_steps", lambda directory: [2, 4, 8])
    monkeypatch.setattr(steps, "best_step", lambda directory: 4)
    config = type("Config", (), {"run": type("Run", (), {"directory": "run"})})
    assert fixed_step(config, step) == fixed  # type: ignore[arg-type]
