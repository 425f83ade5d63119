"""Ranks as processes: how they begin and, however it comes about, end."""

import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from lowering.ascend import launch
from lowering.ascend.ranks import Ranks
from lowering.errors import LoweringError, PeerLost

HOST = """
from lowering.ascend import launch
from lowering.ascend.ranks import Ranks
ranks = Ranks(launch.agree_on_cluster(2, ""), "CPU")
print("begun", flush=True)
while True:
    ranks.call("forget", lambda rank: [[]])
"""


EARLIER: set[psutil.Process] = set()  # ranks of an engine live as long as this process


@pytest.fixture(autouse=True)
def leave_out_earlier():
    EARLIER.update(psutil.Process().children())
    yield
    EARLIER.clear()


def children(pid: int | None = None) -> dict[str, psutil.Process]:
    """Processes that were started for ranks by a test, by rank or role."""
    found = {}
    for one in set(psutil.Process(pid).children()) - EARLIER:
        told = one.environ()
        if "GRAPHTRAIN_RANK_HOST" in told:
            is_rank = "GRAPHTRAIN_RANK_PIPE" in told
            found[told["RANK_ID"] if is_rank else told["MS_ROLE"]] = one
    return found


def test_a_rank_that_is_killed_is_named_and_ends_all(mindspore):
    ranks = Ranks(launch.agree_on_cluster(2, ""), "CPU")
    started = children()
    assert set(started) == {"0", "1", "MS_SCHED"}
    for one in started.values():
        one.terminate()  # as a scheduler does to whatever belongs to a job
    ranks.call("put", lambda rank: [[(7, np.array(rank), "int64")]])
    assert [int(one) for one in ranks.call("get", lambda rank: [7])] == [0, 1]
    started["1"].kill()
    with pytest.raises(LoweringError, match=r"^rank 1 has ended \(SIGKILL: "):
        ranks.call("forget", lambda rank: [[]])
    assert not psutil.wait_procs(started.values(), timeout=10)[1]
    ranks.close()


def test_a_rank_that_is_killed_before_all_have_started_is_named(mindspore):
    def kill() -> None:
        while "1" not in (started := children()):
            time.sleep(0.01)
        started["1"].kill()

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(PeerLost, match=r"^rank 1 has ended \(SIGKILL: .* before all ranks had"):
        Ranks(launch.agree_on_cluster(2, ""), "CPU")
    assert not children()


@pytest.mark.parametrize("begun", [False, True])
def test_a_host_that_is_killed_leaves_no_rank(mindspore, begun):
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    if begun:
        assert host.stdout.readline() == "begun\n"
    while len(children(host.pid)) < 3:
        assert host.poll() is None
    started = children(host.pid).values()
    host.kill()
    host.communicate()
    assert host.returncode == -signal.SIGKILL
    assert not psutil.wait_procs(started, timeout=10)[1]


def test_a_host_that_cannot_take_part_says_so(monkeypatch):
    with pytest.raises(LoweringError, match="no MindSpore here"):
        launch.agree_on_cluster(4, "no MindSpore here")
    other = '{"problem": "no MindSpore there", "address": "10.0.0.2", "port": 1}'
    monkeypatch.setattr(launch.distributed, "all_gather_text", lambda word: [word, other])
    with pytest.raises(LoweringError, match="process 1: no MindSpore there"):
        launch.agree_on_cluster(4, "")


def test_ranks_meet_where_the_others_see_the_first_host(monkeypatch):
    said = ['{"problem": "", "address": "127.0.1.1", "port": 1}',
            '{"problem": "", "address": "10.0.0.1", "port": 2}']  # fmt: skip
    monkeypatch.setattr(launch.distributed, "all_gather_text", lambda word: said)
    monkeypatch.setattr(launch.distributed, "rank", lambda: 1)
    assert launch.agree_on_cluster(16, "") == launch.Cluster(16, range(8, 16), "10.0.0.1", 1)
