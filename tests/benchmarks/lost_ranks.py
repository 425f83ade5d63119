"""Whether every process of a run ends with our message when one rank is lost, at random moments.

Each trial starts a run, disturbs one rank at a random moment, and waits. The moment is in the start
of the run in one of four trials, else in its steps, every third of which saves and every fifth
evaluates. Cases:

- kill: SIGKILL; with MindSpore ranks, to one of them.
- stop: SIGSTOP; the stopped process itself cannot end, and is not judged.
- kill-host, stop-host: the same to one of several processes that have started MindSpore ranks.
- block: the data loader of one rank never returns.
- disk: writes of one rank to the run directory fail with "no space left on device".

A trial is good if every other process ends in time with the status of its case, one line that
names the rank, and no other line: no traceback, no words of Gloo, XLA, TensorStore or MindSpore.
A rank that is lost in a step leaves the Python stacks of all others. The limits of the watchdog are
low, so that trials are short (--step-timeout, --phase-timeout, --join-timeout). A stopped process
must still be stopped when the others have ended; if it is not, the trial says nothing, and is
counted as spoiled.

    python tests/benchmarks/lost_ranks.py [--targets cpu:2x1 cpu:4x1 ascend-cpu:2 ascend-cpu:2x1]
"""

import argparse
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trial_places import (
    Machine,
    Running,
    Trials,
    begin,
    exists,
    healthy_start_seconds,
    make_trials,
    mindspore_ranks,
    state,
)

LOST, USER_ERROR, COMPUTED = 75, 2, 0
CASES = ("kill", "stop", "block", "disk")
HOST_CASES = ("kill-host", "stop-host")
STEPS = [
    "run.steps=100000", "run.checkpoints.local_every=3", "run.evaluate_every=5",
    "run.evaluate_batches=3",
]  # fmt: skip
BLOCKED_LOADER = """
import sys, threading
from graphtrain.data.batches import loader
read, calls = loader.Loader.__next__, []

def block(self):
    calls.append(None)
    if len(calls) == {call}:
        open({marker!r}, "w").close()
        threading.Event().wait()
    return read(self)

loader.Loader.__next__ = block
from graphtrain.cli import main
main()
"""
_LIBRARY = Path(__file__).with_name("full_disk.c")


@dataclass(frozen=True)
class Moment:
    """When a rank is disturbed: seconds after the start, or after a step."""

    seconds: float
    step: int | None = None

    def wait(self, running: Running) -> bool:
        """Wait for the moment; return whether the run reached it."""
        if self.step is not None and not running.wait_for_step(self.step):
            return False
        time.sleep(self.seconds)
        return True

    def __str__(self) -> str:
        since = f"step {self.step}" if self.step else "start"
        return f"{since} + {self.seconds:.3f} s"


@dataclass(frozen=True)
class Trial:
    """One disturbed run."""

    machine: Machine
    case: str
    victim: int  # of the ranks of MindSpore, or of the processes
    moment: Moment

    @property
    def is_of_device(self) -> bool:
        """Whether the victim is a rank of MindSpore.

        A process that has started such ranks reads data and writes files for all of them.
        """
        return self.machine.is_ascend and self.case in ("kill", "stop")

    @property
    def victims_name(self) -> str:
        """Pattern of the victim's name in messages."""
        if self.machine.ranks_per_process > 1 and not self.is_of_device:
            return rf"\bprocess {self.victim} \("
        return rf"\branks? ([\d, ]*\b)?{self.victim}\b"

    @property
    def lost_ranks(self) -> range:
        """Ranks that cannot write their stacks."""
        if self.case not in ("kill", "stop", *HOST_CASES):
            return range(0)
        each = 1 if self.is_of_device else self.machine.ranks_per_process
        return range(self.victim * each, (self.victim + 1) * each)


class Spoiled(Exception):
    """A trial was disturbed, and says nothing."""


def random_trial(
    machine: Machine, case: str, start: float, last_step: int, pick: random.Random
) -> Trial:
    """Choose a rank, and a moment in the start of the run or up to a step."""
    of_devices = machine.is_ascend and case in ("kill", "stop")
    ranks = machine.devices if of_devices else machine.processes
    is_early = pick.random() < 0.25
    moment = (
        Moment(pick.uniform(0, start))
        if is_early
        else Moment(pick.uniform(0, 0.2), pick.randint(2, last_step))
    )
    return Trial(machine, case, pick.randrange(ranks), moment)


def take(
    trials: Trials, trial: Trial, number: str, limits: list[str], timeout: float
) -> tuple[list[str], float]:
    """Take a trial; return what was wrong with it, and the seconds until all processes ended."""
    place = trials.place(number)
    full, marker = place.path / "disk-is-full", place.path / "blocked"
    words = [word for setting in STEPS + limits for word in ("--set", setting)]
    python, environments = {}, {}
    if trial.case == "block":
        call = (trial.moment.step or 0) + 1
        python[trial.victim] = ["-c", BLOCKED_LOADER.format(call=call, marker=str(marker))]
    if trial.case == "disk":
        environments[trial.victim] = {
            "LD_PRELOAD": str(trials.root / "full_disk.so"),
            "FULL_DISK": str(place.path / "run"),
            "FULL_DISK_NOW": str(full),
        }
    running = begin(place, trial.machine, words, python=python, environments=environments)
    try:
        ranks = disturb(trial, running, full, marker)
        if ranks is None:
            return ["the run did not reach the moment"], 0.0
        return judge(trial, number, running, ranks, timeout)
    finally:
        running.kill()
        for pid in mindspore_pids.pop(id(running), {}).values():
            if exists(pid):
                os.kill(pid, signal.SIGKILL)


mindspore_pids: dict[int, dict[int, int]] = {}


def disturb(trial: Trial, running: Running, full: Path, marker: Path) -> list[int] | None:
    """Disturb the run; return the ranks whose processes must end."""
    everyone = list(range(len(running.processes)))
    if trial.case == "block":
        deadline = time.monotonic() + 300
        while not marker.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return everyone if marker.exists() else None
    if trial.is_of_device:
        return everyone if signal_mindspore_rank(trial, running) else None
    if not trial.moment.wait(running):
        return None
    if trial.case == "disk":
        full.touch()
        return everyone
    sent = signal.SIGKILL if trial.case.startswith("kill") else signal.SIGSTOP
    running.processes[trial.victim].process.send_signal(sent)
    return [rank for rank in everyone if rank != trial.victim]


def signal_mindspore_rank(trial: Trial, running: Running) -> bool:
    """Signal a rank; a moment in the start counts from when its process is there."""
    hosts, deadline = [each.process for each in running.processes], time.monotonic() + 300
    while len(pids := mindspore_ranks([host.pid for host in hosts])) < trial.machine.devices:
        if any(host.poll() is not None for host in hosts) or time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    mindspore_pids[id(running)] = pids
    if not trial.moment.wait(running):
        return False
    os.kill(pids[trial.victim], signal.SIGKILL if trial.case == "kill" else signal.SIGSTOP)
    return True


def judge(
    trial: Trial, name: str, running: Running, ranks: list[int], timeout: float
) -> tuple[list[str], float]:
    """Wait for the end of the run; return what was wrong, and the seconds until it ended."""
    since = time.monotonic()
    running.wait(ranks, timeout)
    expected = USER_ERROR if trial.case == "disk" else LOST
    wrong = []
    for each in (running.processes[rank] for rank in ranks):
        who, messages = f"rank {each.rank}", each.messages()
        if each.ended_at is None:
            wrong.append(f"{who} has not ended after {timeout:.0f} s")
        elif each.process.returncode != expected:
            wrong.append(f"{who} ended with status {each.process.returncode}")
        if each.ended_at is not None:
            say(f"  {name}: {who} after {each.ended_at - since:.1f} s, {messages[-1:]}")
        if len(messages) != 1 or not messages[0].startswith("error: "):
            wrong.append(f"{who} said {len(messages)} lines: {messages[:1]} ... {messages[-1:]}")
        # A rank that reports an error of its own does not name itself.
        elif not re.search(trial.victims_name, messages[0]) and not (
            trial.case == "disk" and each.rank == trial.victim
        ):
            wrong.append(f"{who} does not name {trial.victim}: {messages}")
    if expected == LOST and trial.moment.step is not None:
        wrong += [f"no stacks of rank {rank}" for rank in without_stacks(trial, running.path)]
    left = [pid for pid in mindspore_pids.get(id(running), {}).values() if exists(pid)]
    if left:
        wrong.append(f"ranks of MindSpore are left: {left}")
    if trial.case == "stop-host" or (trial.case == "stop" and not trial.is_of_device):
        victim = running.processes[trial.victim].process
        if state(victim.pid) != "T":
            raise Spoiled(f"process {trial.victim} is no longer stopped ({state(victim.pid)})")
    ends = [running.processes[rank].ended_at or since + timeout for rank in ranks]
    return wrong, max(ends) - since


def without_stacks(trial: Trial, path: Path) -> list[int]:
    """Return the ranks whose Python stacks are missing. A lost rank cannot write any."""
    machine = trial.machine
    ranks = range(machine.devices if machine.is_ascend else machine.processes)
    stacks = path / "run" / "stacks"
    return [
        r for r in ranks if r not in trial.lost_ranks and not (stacks / f"rank-{r}.txt").exists()
    ]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    options = parse()
    alone = [each for each in options.targets if Machine(each).processes == 1]
    if alone and set(options.cases) & set(HOST_CASES):
        sys.exit(f"{', '.join(alone)}: one process has no other that could name it")
    limits = [
        f"run.watchdog.step_timeout={options.step_timeout}",
        f"run.watchdog.phase_timeout={options.phase_timeout}",
        f"run.watchdog.join_timeout={options.join_timeout}",
    ]
    trials = make_trials(options.directory)
    library = trials.root / "full_disk.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(_LIBRARY), "-ldl"], check=True
    )
    counts: dict[str, Counter] = {}
    for machine in map(Machine, options.targets):
        trials.compile(machine)
        start = healthy_start_seconds(trials, machine, ["--set", "run.steps=100000"])
        say(f"{machine.target}: {start:.1f} s to the second step")
        numbers = range(options.first, options.first + options.times)
        chosen = list(itertools.product(options.cases, numbers))

        def one(
            case: str, index: int, machine: Machine = machine, start: float = start
        ) -> tuple[str, float]:
            pick = random.Random(f"{options.seed} {machine.target} {case} {index}")
            trial = random_trial(machine, case, start, options.last_step, pick)
            name = f"{machine.target}-{case}-{options.seed}-{index}".replace(":", "-")
            try:
                wrong, seconds = take(trials, trial, name, limits, options.timeout)
            except Spoiled as reason:
                say(f"{name}: {trial.victim}, {trial.moment}: SPOILED: {reason}")
                return "spoiled", 0.0
            say(f"{name}: {trial.victim}, {trial.moment}: {'; '.join(wrong) or 'good'}")
            return "wrong" if wrong else "good", seconds

        with ThreadPoolExecutor(options.parallel) as pool:
            results = pool.map(one, *zip(*chosen, strict=True))
            for (case, _), (outcome, seconds) in zip(chosen, results, strict=True):
                count = counts.setdefault(f"{machine.target} {case}", Counter(good=0, wrong=0))
                count[outcome] += 1
                count["slowest_seconds"] = max(count["slowest_seconds"], math.ceil(seconds))
    print(json.dumps(counts, indent=2))
    return 1 if any(count["wrong"] for count in counts.values()) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs that lose a rank at random moments")
    parser.add_argument("--targets", nargs="+", default=["cpu:2x1", "cpu:4x1", "ascend-cpu:2"])
    parser.add_argument("--cases", nargs="+", choices=(*CASES, *HOST_CASES), default=CASES)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--parallel", type=int, default=1, help="trials at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--last-step", type=int, default=30, help="of the moments")
    parser.add_argument("--step-timeout", type=float, default=8.0)
    parser.add_argument("--phase-timeout", type=float, default=45.0)
    parser.add_argument("--join-timeout", type=float, default=45.0)
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds to end")
    parser.add_argument("--directory", type=Path, help="for the trials; kept")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
