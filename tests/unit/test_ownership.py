"""Whose a run's directory is."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphtrain.errors import TrainingError
from graphtrain.run.directory_lock import locked_run_directory
from lowering.machine.leases import LeaseTiming


def refuse(directory, written=()):
    with pytest.raises(ZeroDivisionError), locked_run_directory(directory):
        for name in written:
            (directory / name).touch()
        raise ZeroDivisionError


def test_a_refused_run_leaves_no_directory_that_it_made(tmp_path):
    refuse(tmp_path / "runs" / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_something_in_it_or_from_before_stays(tmp_path):
    (tmp_path / "before").mkdir()
    refuse(tmp_path / "before")
    refuse(tmp_path / "run", ["metrics.jsonl"])
    assert {path.name for path in tmp_path.iterdir()} == {"before", "run"}


def test_only_one_owns_it_and_the_next_can_afterwards(tmp_path):
    with locked_run_directory(tmp_path / "run"):
        (tmp_path / "run/config.toml").touch()
        with (
            pytest.raises(TrainingError, match="another process"),
            locked_run_directory(tmp_path / "run"),
        ):
            pass
    with locked_run_directory(tmp_path / "run"):
        pass


ROOT = Path(__file__).parents[2]
QUICK = {"heartbeat_seconds": 0.02, "expiry_seconds": 0.3}
HOLD = """
import errno, fcntl, sys
from pathlib import Path

def no_flock(*arguments):
    raise OSError(getattr(errno, sys.argv[1]), "no locks on this file system")

fcntl.flock = fcntl.lockf = no_flock
from lowering.machine.leases import LeaseTiming
from graphtrain.run.directory_lock import locked_run_directory
with locked_run_directory(Path("run"), LeaseTiming(0.02, 0.3, sys.argv[2] or None)):
    print("holds", flush=True)
    input()
"""


@pytest.fixture(params=["ENOSYS", "ENOTSUP"])
def hold(request, tmp_path):
    """A function that starts a process which owns `run`, on a file system without locks."""
    processes = []

    def hold(host: str = "") -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, request.param, host],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        processes.append(process)
        assert process.stdout.readline() == "holds\n"
        return process

    yield hold
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def no_flock(monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOSYS, "no locks on this file system")

    monkeypatch.setattr(fcntl, "flock", refuse)


def lock(directory: Path, **pace):
    return locked_run_directory(directory, LeaseTiming(**QUICK, **pace))


def test_without_flock_a_living_owner_is_named_with_its_age(tmp_path, hold, no_flock):
    owner = hold()
    with (
        pytest.raises(
            TrainingError,
            match=rf"process {owner.pid} on {os.uname().nodename}, since .*, last heartbeat \d+ s "
            rf"ago; .*set run.directory to another .*remove {tmp_path}/run/.lease",
        ),
        lock(tmp_path / "run"),
    ):
        pass


def test_a_killed_owner_of_this_host_is_replaced_at_once(tmp_path, hold, no_flock):
    owner = hold()
    owner.kill()
    owner.wait()
    with locked_run_directory(tmp_path / "run"):  # with the usual 45 s, of which none passes
        pass


def test_an_owner_whose_number_another_process_has_is_dead(tmp_path, hold, no_flock):
    hold().kill()
    claim = tmp_path / "run/.lease/1"
    info = json.loads(claim.read_text())
    claim.write_text(json.dumps(info | {"pid": os.getpid()}))
    with locked_run_directory(tmp_path / "run"):
        pass


def test_a_living_owner_of_another_host_is_refused_after_its_heartbeat(tmp_path, hold, no_flock):
    hold("elsewhere")
    with (
        pytest.warns(UserWarning, match=r"run is locked by process .*; waiting up to 0 s"),
        pytest.raises(TrainingError, match="another process is training into"),
        lock(tmp_path / "run"),
    ):
        pass


def test_a_killed_owner_of_another_host_is_replaced_when_it_stays_silent(tmp_path, hold, no_flock):
    owner = hold("elsewhere")
    owner.kill()
    owner.wait()
    with pytest.warns(UserWarning, match="waiting up to"), lock(tmp_path / "run"):
        pass


def test_who_was_replaced_during_a_pause_ends_without_saving(tmp_path, hold, no_flock):
    owner = hold("elsewhere")
    (tmp_path / "run/.lease/1").rename(tmp_path / "run/.lease/2")  # as another claimant does
    assert owner.wait() == 2
    err = owner.stderr.read()
    assert "another process now trains into run" in err


def test_a_directory_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lease").touch()
    with (
        pytest.raises(TrainingError, match=r"cannot be written .*set run.directory"),
        locked_run_directory(tmp_path / "run"),
    ):
        pass
