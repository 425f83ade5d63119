"""Which process prepares a dataset, on file systems without locks too."""

import errno
import fcntl
import json
import os
import subprocess
import threading

import pytest

from graphtrain.data.prepare.output_lock import locked_output
from graphtrain.data.prepare.text import prepare
from lowering.machine.leases import Lease, LeaseTiming

QUICK = LeaseTiming(heartbeat_seconds=0.02, expiry_seconds=0.3)


@pytest.fixture(params=["ENOLCK", "ENOSYS"], autouse=True)
def no_flock(request, monkeypatch):
    def refuse(*arguments):
        raise OSError(getattr(errno, request.param), "no locks on this file system")

    for function in ("flock", "lockf"):
        monkeypatch.setattr(fcntl, function, refuse)


def test_a_living_owner_is_waited_for_and_named_with_its_age(tmp_path):
    owner = Lease(tmp_path / ".lease", QUICK)
    assert owner.try_acquire()
    threading.Timer(0.3, owner.release).start()
    name = rf"process {os.getpid()} on {os.uname().nodename}, since .*, last heartbeat \d+ s ago"
    with (
        pytest.warns(UserWarning, match=rf"prepares data in {tmp_path}: {name}; .*\.lease"),
        locked_output(tmp_path, QUICK),
    ):
        assert not owner.try_acquire()


def test_a_silent_owner_on_another_host_is_replaced(tmp_path):
    dead = Lease(tmp_path / ".lease", LeaseTiming(1000.0, host="elsewhere"))
    assert dead.try_acquire()
    with pytest.warns(UserWarning, match="waiting"), locked_output(tmp_path, QUICK):
        assert (tmp_path / ".lease/2").exists()


def test_a_preparation_that_was_killed_on_this_host_is_replaced_at_once(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree\n")
    killed = subprocess.Popen(["true"])
    killed.wait()
    assert Lease(tmp_path / "data/.lease").try_acquire()
    claim = tmp_path / "data/.lease/1"
    claim.write_text(json.dumps(json.loads(claim.read_text()) | {"pid": killed.pid}))
    result = prepare([tmp_path / "a.txt"], tmp_path / "data", "bytes", validation=0)
    assert result.train.documents == 3
