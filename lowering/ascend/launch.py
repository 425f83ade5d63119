"""The processes of ranks: started as msrun starts them, and ended together.

msrun itself is not used. Its ranks lead sessions of their own, so they are left behind where it or
the run is killed; and of two hosts that are one machine, as in a test, both would be its master.
Source: the variables of a dynamic cluster, as mindspore.parallel.cluster sets them (2.10).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from lowering.errors import LoweringError
from lowering.machine import distributed

PATIENCE = 180  # seconds for all ranks to begin

_SCRIPT = Path(__file__).with_name("rank.py")
_SCHEDULER = "scheduler"


@dataclass(frozen=True)
class Cluster:
    """The ranks of a run, and which of them are here."""

    count: int  # on all hosts
    mine: range  # on this one
    address: str  # of the scheduler, through which they meet; on the first host
    port: int


def agree(count: int, problem: str) -> Cluster:
    """The cluster that all processes of a run are in; each has as many ranks.

    Args:
        count: ranks of all.
        problem: why this host cannot take part; empty if it can.

    Raises:
        LoweringError: the problem, of this host or of another.
    """
    name = distributed.first_host()
    try:
        address = str(socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)[0][4][0])
    except OSError as error:
        address = ""
        problem = problem or f"{name}, the first host of the run, has no address here: {error}"
    offer = {"problem": problem, "address": address, "port": _free_port()}
    offers = [json.loads(word) for word in distributed.all_gather_text(json.dumps(offer))]
    if problem:
        raise LoweringError(problem)
    for rank, other in enumerate(offers):
        if other["problem"]:
            raise LoweringError(f"process {rank}: {other['problem']}")
    each, first = count // len(offers), distributed.rank() * (count // len(offers))
    # As the last host resolves it: many hosts take their own name for 127.0.0.1.
    return Cluster(count, range(first, first + each), offers[-1]["address"], offers[0]["port"])


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


class Launched:
    """The processes of the ranks of this host, and on the first host MindSpore's scheduler."""

    def __init__(self, cluster: Cluster, device: str, directory: Path) -> None:
        """Start them.

        Args:
            device: MindSpore's name: CPU or Ascend.
            directory: for what they print.
        """
        self._directory = directory
        self._processes: dict[int | str, subprocess.Popen[bytes]] = {}  # by rank
        self.connections: dict[int, Connection] = {}
        together = {
            "MS_WORKER_NUM": str(cluster.count),
            "RANK_SIZE": str(cluster.count),
            "MS_SCHED_HOST": cluster.address,
            "MS_SCHED_PORT": str(cluster.port),
            "MS_TOPO_TIMEOUT": str(PATIENCE),
        }
        if cluster.count > 1 and cluster.mine.start == 0:
            self._start(_SCHEDULER, device, together | {"MS_ROLE": "MS_SCHED", "RANK_ID": "0"}, ())
        for local, rank in enumerate(cluster.mine):
            here, there = Pipe()
            its_own = {"RANK_ID": str(rank), "DEVICE_ID": str(local)}
            if cluster.count > 1:
                its_own |= together | {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank)}
            its_own["GRAPHTRAIN_RANK_PIPE"] = str(there.fileno())
            with there:
                self._start(rank, device, its_own, (there.fileno(),))
            self.connections[rank] = here

    def _start(
        self, name: int | str, device: str, its_own: Mapping[str, str], files: tuple[int, ...]
    ) -> None:
        environment = {
            "GLOG_v": "3",  # MindSpore's errors, not its warnings
            **os.environ,
            "GRAPHTRAIN_RANK_DEVICE": device,
            "GRAPHTRAIN_RANK_HOST": str(os.getpid()),
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path))),
            **its_own,
        }
        with self._log(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, str(_SCRIPT)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=files,
                process_group=0,  # a Ctrl-C is for the run alone; what a rank starts ends with it
            )

    def _log(self, name: int | str) -> Path:
        return self._directory / f"{name}.log"

    def has_ended(self, rank: int) -> bool:
        return self._processes[rank].poll() is not None

    def end_of(self, rank: int) -> str:
        """How a rank ended and what it said last."""
        try:
            status = self._processes[rank].wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it no longer answers"
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"{how}: {self._last_words(rank)}"

    def _last_words(self, rank: int) -> str:
        lines = self._log(rank).read_text(errors="replace").splitlines()
        lines = [line.strip() for line in lines if line.strip()]
        telling = [line for line in lines if "Error" in line or "error" in line]
        return " / ".join((telling or lines)[-3:]) or "it said nothing"

    def wait(self, seconds: float) -> None:
        """Let the ranks end by themselves; the scheduler waits for those of all hosts."""
        for name, process in self._processes.items():
            if name != _SCHEDULER:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=seconds)

    def kill(self) -> None:
        """End all, with whatever they have started."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
