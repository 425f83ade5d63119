"""run.checkpoints.local: the checkpoints of a run are on another disk, behind a link."""

import pytest

from graphtrain.checkpoints.local_tier import link_local_tier
from graphtrain.checkpoints.steps import saved_steps
from graphtrain.errors import TrainingError


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_a_link_is_made_once_and_leads_to_the_disk_also_after_it_was_lost(run, tmp_path):
    for _ in range(2):
        link_local_tier(run, str(tmp_path / "memory/one"))
        (tmp_path / "memory/one/4").mkdir()
        assert saved_steps(run / "checkpoints") == [4]
        (tmp_path / "memory/one/4").rmdir()
        (tmp_path / "memory/one").rmdir()
        assert saved_steps(run / "checkpoints") == []


def test_checkpoints_elsewhere_are_never_left_behind(run, tmp_path):
    (run / "checkpoints/4").mkdir(parents=True)
    with pytest.raises(TrainingError, match=r"\(steps 4\) are in .*run/checkpoints; move them to"):
        link_local_tier(run, str(tmp_path / "first"))
    (run / "checkpoints/4").rmdir()
    link_local_tier(run, str(tmp_path / "first"))  # the empty folder becomes a link
    link_local_tier(run, str(tmp_path / "second"))  # and another one, while nothing is saved
    (tmp_path / "second/8").mkdir()
    with pytest.raises(TrainingError, match=r"\(steps 8\) are in .*second; move them to .*first"):
        link_local_tier(run, str(tmp_path / "first"))
    with pytest.raises(
        TrainingError, match=r"second has checkpoints.*with --fresh, move them away"
    ):
        link_local_tier(run, str(tmp_path / "second"), fresh=True)
    assert saved_steps(run / "checkpoints") == [8]
