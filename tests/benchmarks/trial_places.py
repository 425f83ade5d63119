"""Places in which trials of interruptions run: a small model, its data and programs, made once."""

import itertools
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from measuring import ROOT

sys.path.insert(0, str(ROOT / "tests" / "run"))
from places import PROGRESS, Place, furnish  # pyright: ignore[reportMissingImports]

_STEP = re.compile(r"step (\d+)/")
# Progress of a compilation, which is no message.
_COMPILING = re.compile(
    r"compiling missing graphs: "
    r"|\w+: (queued|starting|tracing|compil|storing|cached|waiting|attempt)"
)


@dataclass(frozen=True)
class Machine:
    """A target, with the processes that run it."""

    target: str

    @property
    def processes(self) -> int:
        hosts = self.target.partition(":")[2].partition("x")
        return int(hosts[0]) if hosts[1] else 1

    @property
    def is_ascend(self) -> bool:
        return self.target.startswith("ascend")

    @property
    def devices(self) -> int:
        hosts, _, each = self.target.partition(":")[2].partition("x")
        return int(hosts) * int(each or 1)

    @property
    def ranks_per_process(self) -> int:
        """MindSpore ranks of each of several processes."""
        return self.devices // self.processes if self.is_ascend and self.processes > 1 else 1

    @property
    def words(self) -> list[str]:
        """Options of the command; weights are sharded, so that every process writes checkpoints."""
        axis = "data" if self.is_ascend and self.processes == 1 else "fsdp"
        mesh = ["--set", "program.mesh.data=1", "--set", f"program.mesh.{axis}={self.devices}"]
        return ["--target", self.target, *mesh]


@dataclass
class Process:
    """A process of a run, whose output goes to files: a full pipe would block it."""

    rank: int
    process: subprocess.Popen[str]
    out: Path
    err: Path
    ended_at: float | None = None

    def step(self) -> int:
        """The last step that it reported."""
        found = _STEP.findall(self.err.read_text())
        return int(found[-1]) if found else 0

    def messages(self) -> list[str]:
        """What it said besides its steps; MindSpore and Gloo say nothing on stderr."""
        lines = self.err.read_text().splitlines()
        lines = [line for line in lines if line and not line.startswith(PROGRESS)]
        return [line[:500] for line in lines if not _COMPILING.match(line)]


@dataclass
class Running:
    """A run: its processes by rank."""

    path: Path
    processes: list[Process] = field(default_factory=list)

    def wait(self, ranks: Sequence[int], timeout: float) -> None:
        """Wait until the processes of some ranks have ended; note when."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            waiting = [self.processes[rank] for rank in ranks]
            for each in waiting:
                if each.ended_at is None and each.process.poll() is not None:
                    each.ended_at = time.monotonic()
            if all(each.ended_at is not None for each in waiting):
                return
            time.sleep(0.05)

    def wait_for_step(self, step: int, timeout: float = 300) -> bool:
        """Wait until rank 0 has reported a step; return whether it did before the run ended."""
        first, deadline = self.processes[0], time.monotonic() + timeout
        while first.step() < step and time.monotonic() < deadline:
            if first.process.poll() is not None:
                return first.step() >= step
            time.sleep(0.01)
        return first.step() >= step

    def kill(self) -> None:
        for each in self.processes:
            if each.process.poll() is None:
                each.process.kill()
            each.process.wait()


@dataclass
class Trials:
    """A directory with data and a cache, and one subdirectory for every trial."""

    root: Path
    corpus: Path

    def place(self, name: str) -> Place:
        """Return a place with a configuration and data, new or not."""
        path = self.root / name
        path.mkdir(exist_ok=True)
        if not (path / "config.toml").exists():
            furnish(path, self.corpus)
        return Place(path, self.root / "cache")

    def compile(self, machine: Machine) -> None:
        self.place("compile").command("compile", "config.toml", *machine.words)


def make_trials(root: Path | None) -> Trials:
    """Prepare data in a directory; a temporary one if none is given."""
    root = root or Path(tempfile.mkdtemp(prefix="trials-"))
    root.mkdir(parents=True, exist_ok=True)
    corpus = root / "corpus"
    if not corpus.exists():
        corpus.mkdir()
        place = Place(corpus, root / "cache")
        place.command("data", "sample", "text.jsonl", "--megabytes", "0.3")
        words = ["--output", "data", "--tokenizer", "bytes", "--validation", "0.1"]
        place.command("data", "prepare", "text.jsonl", *words)
    return Trials(root, corpus / "data")


def begin(
    place: Place,
    machine: Machine,
    words: Sequence[str],
    *,
    python: Mapping[int, Sequence[str]] | None = None,
    environments: Mapping[int, Mapping[str, str]] | None = None,
) -> Running:
    """Start the processes of a run.

    Args:
        place: where.
        machine: target and processes.
        words: more words of the command.
        python: for a rank, what Python starts in place of the command.
        environments: for a rank, more variables.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    count, running = machine.processes, Running(place.path)
    for rank in range(count):
        options = ["--coordinator", meeting, "--processes", str(count), "--rank", str(rank)]
        start = (python or {}).get(rank, ["-m", "graphtrain"])
        out, err = place.path / f"out-{rank}.txt", place.path / f"err-{rank}.txt"
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, *start, "run", "config.toml", *machine.words, *words]
                + (options if count > 1 else []),
                cwd=place.path,
                env=place.environment() | dict((environments or {}).get(rank, {})),
                text=True,
                stdout=stdout,
                stderr=stderr,
            )
        running.processes.append(Process(rank, process, out, err))
    return running


def mindspore_ranks(parents: Sequence[int]) -> dict[int, int]:
    """Process ids of the MindSpore ranks that some processes have started, by rank."""
    found = {}
    for child in itertools.chain.from_iterable(map(_children, parents)):
        try:
            lines = Path(f"/proc/{child}/environ").read_bytes().decode().split("\0")
        except OSError:
            continue
        environment = dict(line.split("=", 1) for line in lines if "=" in line)
        if "GRAPHTRAIN_RANK_PIPE" in environment:
            found[int(environment["RANK_ID"])] = int(child)
    return found


def _children(parent: int) -> list[str]:
    try:
        return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except OSError:
        return []


def exists(pid: int) -> bool:
    return state(pid) not in ("", "Z")


def state(pid: int) -> str:
    """State of a process: R, S, T (stopped), Z (ended), ...; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def healthy_start_seconds(trials: Trials, machine: Machine, words: Sequence[str]) -> float:
    """Seconds from the start of a run to its second step, in a run without faults."""
    running, started = (
        begin(trials.place(f"warm-{machine.target}"), machine, words),
        time.monotonic(),
    )
    try:
        assert running.wait_for_step(2), [each.err.read_text() for each in running.processes]
        return time.monotonic() - started
    finally:
        running.kill()
