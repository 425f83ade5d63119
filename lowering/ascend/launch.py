"""Start of the rank processes of this host, as msrun starts them, and their common end.

msrun itself is not used: its ranks lead their own sessions, so they would survive if msrun or the
run is killed; and if two hosts are the same machine, as in a test, both would be the master.
Source: environment variables of a dynamic cluster, as mindspore.parallel.cluster sets them (2.10).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from lowering.errors import LoweringError
from lowering.machine import rank_processes
from lowering.machine.rank_processes import HAS_ENDED
from lowering.xla import distributed, lost_ranks

START_TIMEOUT = 180  # seconds for all ranks to start

_STACKS_TIMEOUT = 3  # seconds for the ranks to write their stacks
# Seconds for a collective on a CPU, where MindSpore's own limit is half a minute: a watchdog, which
# knows the limits of the run and names the rank that the others wait for, is to end the run.
_COLLECTIVE_TIMEOUT = 24 * 3600

_SCRIPT = Path(__file__).with_name("rank.py")
_SCHEDULER = "scheduler"


@dataclass(frozen=True)
class Cluster:
    """The ranks of a run, and those on this host."""

    count: int  # ranks on all hosts
    local_ranks: range  # ranks on this host
    address: str  # of the scheduler on the first host, through which ranks connect
    port: int


def agree_on_cluster(count: int, problem: str) -> Cluster:
    """Agree with all processes of a run on its cluster, with equally many ranks for each process.

    Args:
        count: number of ranks of all processes.
        problem: why this host cannot take part; empty if it can.

    Raises:
        LoweringError: the problem of this host or of another one.
    """
    name = distributed.first_host()
    try:
        address = str(socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)[0][4][0])
    except OSError as error:
        address = ""
        problem = problem or f"cannot resolve {name}, the first host of the run: {error}"
    offer = {"problem": problem, "address": address, "port": _free_port()}
    offers = [json.loads(text) for text in distributed.all_gather_text(json.dumps(offer))]
    if problem:
        raise LoweringError(problem)
    for rank, peer_offer in enumerate(offers):
        if peer_offer["problem"]:
            raise LoweringError(f"process {rank}: {peer_offer['problem']}")
    ranks_per_process, first = count // len(offers), distributed.rank() * (count // len(offers))
    # As the last host resolves it: many hosts resolve their own name to 127.0.0.1.
    return Cluster(
        count, range(first, first + ranks_per_process), offers[-1]["address"], offers[0]["port"]
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


class RankProcesses:
    """The rank processes of this host, and on the first host also MindSpore's scheduler."""

    def __init__(self, cluster: Cluster, device: str, directory: Path) -> None:
        """Start the processes.

        Args:
            cluster: ranks of the run and of this host.
            device: MindSpore's name: CPU or Ascend.
            directory: for the processes' output.
        """
        self._directory = directory
        self._processes: dict[int | str, subprocess.Popen[bytes]] = {}  # by rank
        self.connections: dict[int, Connection] = {}
        cluster_environment = {
            "MS_WORKER_NUM": str(cluster.count),
            "RANK_SIZE": str(cluster.count),
            "MS_SCHED_HOST": cluster.address,
            "MS_SCHED_PORT": str(cluster.port),
            "MS_TOPO_TIMEOUT": str(START_TIMEOUT),
        }
        if cluster.count > 1 and cluster.local_ranks.start == 0:
            self._start(
                _SCHEDULER,
                device,
                cluster_environment | {"MS_ROLE": "MS_SCHED", "RANK_ID": "0"},
                (),
            )
        for device_id, rank in enumerate(cluster.local_ranks):
            host_end, rank_end = Pipe()
            rank_environment = {"RANK_ID": str(rank), "DEVICE_ID": str(device_id)}
            if cluster.count > 1:
                rank_environment |= cluster_environment | {
                    "MS_ROLE": "MS_WORKER",
                    "MS_NODE_ID": str(rank),
                }
            rank_environment["GRAPHTRAIN_RANK_PIPE"] = str(rank_end.fileno())
            with rank_end:
                self._start(rank, device, rank_environment, (rank_end.fileno(),))
            self.connections[rank] = host_end
        rank_processes.groups.append(self)

    def _start(
        self, name: int | str, device: str, variables: Mapping[str, str], files: tuple[int, ...]
    ) -> None:
        is_watched = lost_ranks.is_watched.is_set()
        environment = {
            "GLOG_v": "3",  # MindSpore logs errors, but no warnings
            **({"MS_CPU_COMM_OP_TIMEOUT": str(_COLLECTIVE_TIMEOUT)} if is_watched else {}),
            **os.environ,
            "GRAPHTRAIN_RANK_DEVICE": device,
            "GRAPHTRAIN_RANK_HOST": str(os.getpid()),
            "GRAPHTRAIN_RANK_STACKS": str(self._stacks(name)),
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path))),
            **variables,
        }
        with self._log(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, str(_SCRIPT)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=files,
                process_group=0,  # Ctrl-C is for the run only; a rank's children end with it
            )

    def _log(self, name: int | str) -> Path:
        return self._directory / f"{name}.log"

    def _stacks(self, name: int | str) -> Path:
        return self._directory / f"{name}.stacks"

    def not_running(self) -> dict[int, str]:
        """Return the ranks of this host that have ended or are stopped, with the reason."""
        reasons = {rank: self._state(self._processes[rank]) for rank in self.connections}
        return {rank: reason for rank, reason in reasons.items() if reason}

    def _state(self, process: subprocess.Popen[bytes]) -> str:
        try:
            # The state follows the name, which is in parentheses and may contain some itself.
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # no Linux, or the process was waited for
            return HAS_ENDED if process.returncode is not None else ""
        names = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "Z": HAS_ENDED}
        return names.get(state, "")

    def write_stacks(self, directory: Path) -> None:
        """Let every rank that runs write its Python stacks to rank-N.txt in a directory.

        A signal asks for them, because the rank's main thread may be blocked in a collective.
        """
        running = self.connections.keys() - self.not_running().keys()
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                self._processes[rank].send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_TIMEOUT
        for rank in running:
            path = self._stacks(rank)
            while not self._is_written(path) and time.monotonic() < deadline:
                time.sleep(0.05)
            if self._is_written(path):
                shutil.copy(path, directory / f"rank-{rank}.txt")

    def _is_written(self, path: Path) -> bool:
        return path.exists() and "most recent call first" in path.read_text(errors="replace")

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of a rank has ended."""
        return self._processes[rank].poll() is not None

    def was_killed(self, rank: int) -> bool:
        """Return whether a rank was ended from outside: by a person, or for want of memory."""
        return self._processes[rank].returncode in (-signal.SIGKILL, -signal.SIGTERM)

    def end_of(self, rank: int) -> str:
        """Return how a rank ended, with its last output."""
        try:
            status = self._processes[rank].wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it no longer responds"
        ending = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"{ending}: {self._last_output(rank)}"

    def _last_output(self, rank: int) -> str:
        lines = self._log(rank).read_text(errors="replace").splitlines()
        lines = [line.strip() for line in lines if line.strip()]
        error_lines = [line for line in lines if "Error" in line or "error" in line]
        return " / ".join((error_lines or lines)[-3:]) or "no output"

    def wait(self, seconds: float) -> None:
        """Wait for the ranks of this host to end, up to `seconds` each.

        Not for the scheduler, which itself waits for the ranks of all hosts.
        """
        for name, process in self._processes.items():
            if name != _SCHEDULER:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=seconds)

    def kill(self) -> None:
        """Kill all processes and their child processes."""
        if self in rank_processes.groups:
            rank_processes.groups.remove(self)
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
