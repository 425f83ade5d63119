"""run.checkpoints.local: the checkpoints of a run are on another disk, behind a link."""

import json
import subprocess
import sys
from contextlib import ExitStack

import pytest

from graphtrain.checkpoints.local_tier import link_local_tier, remove_link
from graphtrain.checkpoints.steps import saved_steps
from graphtrain.errors import TrainingError
from graphtrain.run import agreement, checkpoint_places, host_disks


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


def test_hosts_that_do_not_share_the_disk_are_refused_before_training(tmp_path, monkeypatch):
    """Two ranks, of which the second one answers as told."""
    second = {}

    def all_gather_text(text):
        second.setdefault("said", []).append(text)
        return [text, "" if second["is_blind"] else text]

    for name, value in {"count": 2, "rank": 0}.items():
        monkeypatch.setattr(agreement.distributed, name, lambda value=value: value)
    monkeypatch.setattr(agreement.distributed, "all_gather_text", all_gather_text)
    monkeypatch.setattr(agreement.distributed, "names", lambda ranks: f"ranks {ranks}")
    second["is_blind"] = False
    agreement.check_shared_directory("run.checkpoints.local", tmp_path)
    second["is_blind"] = True
    with pytest.raises(TrainingError, match=r"ranks \[1\] does not see.*must be on a file system"):
        agreement.check_shared_directory("run.checkpoints.local", tmp_path)
    assert not list(tmp_path.iterdir()) and len(second["said"]) == 4
    # Where rank 0 cannot write, it sees nothing either.
    with pytest.raises(TrainingError, match=r"ranks \[0, 1\] does not see"):
        agreement.check_shared_directory("run.directory", tmp_path / "none", wait_seconds=0)


def test_a_disk_is_shared_or_of_one_host_and_nothing_between(tmp_path, monkeypatch):
    """Three ranks, of which the others see what they are told to."""
    seen, names = {}, []

    def all_gather_text(word):
        if word.startswith(".shared-"):
            names[:] = [word, *(f".shared-{rank}" for rank in (1, 2))]
            for rank in json.loads(seen["first"])[1:]:
                (tmp_path / names[rank]).touch()
            return names
        return [word, *seen["others"]] if word.startswith("[") else [word] * 3

    for name, value in {"count": 3, "rank": 0}.items():
        monkeypatch.setattr(agreement.distributed, name, lambda value=value: value)
    monkeypatch.setattr(agreement.distributed, "all_gather_text", all_gather_text)
    monkeypatch.setattr(agreement.distributed, "names", lambda ranks: f"ranks {ranks}")

    def is_shared(first, *others):
        seen.update(first=first, others=others)
        return agreement.is_shared_directory("run.checkpoints.local", tmp_path, 0.2, 0.1)

    assert is_shared("[0, 1, 2]", "[0, 1, 2]", "[0, 1, 2]")
    for path in tmp_path.iterdir():
        path.unlink()
    assert not is_shared("[0]", "[1]", "[2]")
    assert not list(tmp_path.iterdir())
    with pytest.raises(
        TrainingError, match=r"ranks \[0, 1, 2\] shares .* with ranks \[0, 1\] only"
    ):
        is_shared("[0, 1]", "[0, 1]", "[2]")


def test_a_link_to_checkpoints_on_one_disk_is_removed_where_there_are_several(run, tmp_path):
    link_local_tier(run, str(tmp_path / "disk"))
    (tmp_path / "disk/4").mkdir()
    with pytest.raises(TrainingError, match=r"\(steps 4\) are in .*disk, a disk of this host that"):
        remove_link(run)
    (tmp_path / "disk/4").rmdir()
    remove_link(run)
    remove_link(run)
    assert not list(run.iterdir())


def test_parts_of_hosts_on_a_disk_that_all_share_now_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(host_disks.distributed, "count", lambda: 2)
    monkeypatch.setattr(host_disks.distributed, "all_gather_text", lambda word: [word] * 2)
    monkeypatch.setattr(host_disks, "is_shared_directory", lambda setting, directory: True)
    assert not host_disks.is_disk_of_host(tmp_path / "disk")
    (tmp_path / "disk/own/40").mkdir(parents=True)
    with pytest.raises(TrainingError, match=r"disk has parts .*\(steps 40\) from when it was a"):
        host_disks.is_disk_of_host(tmp_path / "disk")


def test_ranks_with_different_training_data_are_refused(monkeypatch):
    identity = {"run.data.train": [{"digest": "a"}], "tokenizer": ["b"]}
    monkeypatch.setattr(agreement.distributed, "names", lambda ranks: f"ranks {ranks}")
    monkeypatch.setattr(agreement.distributed, "all_gather_text", lambda word: [word] * 2)
    agreement.check_same_data(identity)
    monkeypatch.setattr(agreement.distributed, "all_gather_text", lambda word: [word, "other"])
    with pytest.raises(TrainingError, match=r"\[1\] has other training data than ranks \[0\]"):
        agreement.check_same_data(identity)


HOLDS = """
import sys
from pathlib import Path
from graphtrain.run.host_disks import locked_disk

with locked_disk(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_two_runs_are_refused_one_disk_of_a_host(run, tmp_path, monkeypatch):
    monkeypatch.setattr(host_disks, "_LOCK_SECONDS", 0.1)
    words = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline() == b"locked\n"
        with (
            pytest.raises(TrainingError, match=r"another run on this host saves checkpoints in"),
            host_disks.locked_disk(tmp_path),
        ):
            pass
        with (
            pytest.raises(TrainingError, match=r"another run on this host saves checkpoints in"),
            ExitStack() as stack,  # a run in one process, whose directory is a link to the disk
        ):
            checkpoint_places._open_local(run, str(tmp_path), stack, fresh=False)
        assert not list(run.iterdir())
        other.kill()
        other.wait()
        for _ in range(2):  # also again, as after a rewind
            with host_disks.locked_disk(tmp_path):
                pass
