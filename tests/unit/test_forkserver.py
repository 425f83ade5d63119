"""The process that begins workers may be killed, as whatever takes memory may be."""

import os
import signal
import subprocess
import sys
from multiprocessing import forkserver as multiprocessing_forkserver
from pathlib import Path

import pytest

from graphtrain.compile import forkserver

ROOT = Path(__file__).parents[2]


def begin(server):
    """A worker that ends at once."""
    process, pipe = server.start()
    process.join()
    pipe.close()
    assert process.exitcode == 0


@pytest.fixture
def server(monkeypatch):
    """One that imports nothing, and whose workers do nothing."""
    monkeypatch.setattr(forkserver, "_work", id)
    server = forkserver.ForkServer()
    server._context.set_forkserver_preload([])
    return server


def test_a_worker_begins_though_the_forkserver_was_just_killed(server):
    begin(server)
    os.kill(multiprocessing_forkserver._forkserver._forkserver_pid, signal.SIGKILL)
    begin(server)


def test_the_scratch_of_a_killed_command_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    nobody = Path("/proc/sys/kernel/pid_max").read_text().strip()  # no process has this number
    (tmp_path / f"graphtrain-compile-{nobody}-abc" / "graph").mkdir(parents=True)
    alive = tmp_path / f"graphtrain-compile-{os.getpid()}-abc"
    alive.mkdir()
    with forkserver.scratch_directory() as ours:
        assert set(tmp_path.iterdir()) == {alive, ours}
    assert list(tmp_path.iterdir()) == [alive]


FORKSERVER = """
import os, signal
from graphtrain.compile import forkserver

server = forkserver.ForkServer()
server._context.set_forkserver_preload([])
forkserver._work = id
process, pipe = server.start()
process.join()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_socket_of_a_killed_command_is_removed_by_the_next(tmp_path, monkeypatch):
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", FORKSERVER], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("pymp-*")
    of_others = tmp_path / "pymp-of-another-program"
    of_others.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with forkserver.scratch_directory():
        assert not left.exists() and of_others.exists()
