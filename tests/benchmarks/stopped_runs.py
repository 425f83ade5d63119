"""Whether a run that receives SIGTERM at a random moment saves, and resumes bit for bit.

Each trial starts a run, sends SIGTERM to one rank at a random moment, and starts it again until it
is complete. The trials take the moments in turn:

- load: between the start of the process and its second step.
- train: after a random step.
- save: while a checkpoint is written, which is every third step.
- evaluation: before a random batch of an evaluation, which is every fifth step.
- compile: the programs are missing, and the run compiles them first.

A trial is good if all processes end with status 143 (or 0, if the run was complete before) and
nothing is on stderr but progress, or, before all processes are connected, if the others end with a
message that names the rank; if the resumed run ends with status 0, and its metrics and the arrays
of its last checkpoint equal those of a run without a signal. In training, a save or an evaluation,
all processes must have saved and ended in time (--limit).

    python tests/benchmarks/stopped_runs.py [--targets cpu:1 cpu:2x1] [--times 20] [--parallel 2]
"""

import argparse
import json
import math
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trial_places import Machine, Place, Running, Trials, begin, healthy_start_seconds, make_trials

from graphtrain.checkpoints.arrays import restore_array
from graphtrain.checkpoints.info import read_checkpoint_info

STOPPED, DEFAULT_ACTION, LOST = 128 + signal.SIGTERM, -signal.SIGTERM, 75
STEPS, SAVE_EVERY, EVALUATE_EVERY, BATCHES = 120, 3, 5, 8
MOMENTS = ("load", "train", "save", "evaluation", "compile")
SETTINGS = [
    f"run.steps={STEPS}", f"run.checkpoints.local_every={SAVE_EVERY}",
    f"run.evaluate_every={EVALUATE_EVERY}", f"run.evaluate_batches={BATCHES}",
    "run.watchdog.join_timeout=30",
]  # fmt: skip
WORDS = [word for setting in SETTINGS for word in ("--set", setting)]
EVALUATION = """
import time
from graphtrain.run import evaluate
loss_of, batches = evaluate.validation_loss, []

def observed(*arguments, should_stop):
    def stop(batch):
        batches.append(batch)
        if len(batches) == {number}:
            open({marker!r}, "w").close()
            time.sleep({seconds})
        return should_stop(batch)
    return loss_of(*arguments, should_stop=stop)

evaluate.validation_loss = observed
from graphtrain.cli import main
main()
"""


@dataclass(frozen=True)
class Moment:
    """When a rank receives the signal."""

    kind: str
    seconds: float  # after the event
    step: int = 0  # of training, or number of the batch of all evaluations

    def wait(self, running: Running, marker: Path) -> None:
        """Wait for the moment, or the end of the run."""
        if self.kind == "train":
            running.wait_for_step(self.step)
        elif self.kind == "save":
            wait_for_path(running.path / "run" / "checkpoints" / str(self.step), running)
        elif self.kind == "evaluation":
            wait_for_path(marker, running)
        time.sleep(self.seconds)

    def __str__(self) -> str:
        return f"{self.kind} {self.step or ''} + {self.seconds:.3f} s"


def random_moment(kind: str, start: float, pick: random.Random) -> Moment:
    """Choose a moment.

    Args:
        kind: one of MOMENTS.
        start: seconds from the start of a run to its second step, without a signal.
        pick: source of randomness.
    """
    if kind in ("load", "compile"):
        return Moment(kind, pick.uniform(0, start if kind == "load" else 4 * start))
    if kind == "train":
        return Moment(kind, pick.uniform(0, 0.05), pick.randint(1, STEPS - 1))
    if kind == "save":
        return Moment(kind, pick.uniform(0, 0.05), SAVE_EVERY * pick.randint(1, STEPS // 4))
    evaluations = STEPS // EVALUATE_EVERY
    return Moment(kind, pick.uniform(0, 0.05), pick.randint(1, BATCHES * evaluations - 1))


def wait_for_path(path: Path, running: Running) -> None:
    while not path.exists() and running.processes[0].process.poll() is None:
        time.sleep(0.001)


@dataclass(frozen=True)
class Result:
    """Outcome of a trial."""

    what: str
    seconds: float  # from the signal to the end of the last process
    wrong: list[str]


def take(
    trials: Trials, machine: Machine, name: str, moment: Moment, pick: random.Random, limit: float
) -> Result:
    """Take a trial."""
    place, marker = trials.place(name), trials.place(name).path / "evaluating"
    is_compiling = moment.kind == "compile"
    words = [*WORDS, *(["--compile"] if is_compiling else [])]
    if is_compiling:
        place = Place(place.path, place.path / "cache")
    victim = pick.randrange(machine.processes)
    script = EVALUATION.format(number=moment.step, marker=str(marker), seconds=0.05)
    python = {victim: ["-c", script]} if moment.kind == "evaluation" else {}
    running = begin(place, machine, words, python=python)
    try:
        moment.wait(running, marker)
        running.processes[victim].process.send_signal(signal.SIGTERM)
        sent = time.monotonic()
        running.wait(range(machine.processes), 300 if is_compiling else 90)
        wrong = ending(running, victim)
        seconds = max((each.ended_at or sent + 90) for each in running.processes) - sent
    finally:
        running.kill()
    steps = [record["step"] for record in place.journal() if "loss" in record]
    what = f"SIGTERM to rank {victim}, {moment}, ended after {seconds:.1f} s at step {steps[-1:]}"
    if seconds > limit and moment.kind not in ("load", "compile"):
        wrong.append(f"ended after {seconds:.1f} s")
    return Result(what, seconds, wrong or resumption(trials, machine, place, words))


def ending(running: Running, victim: int) -> list[str]:
    """Return what was wrong with the end of a run that was asked to stop."""
    statuses = {each.rank: each.process.poll() for each in running.processes}
    said = [message for each in running.processes for message in each.messages()]
    # A signal before all processes are connected ends that process; the others miss it.
    others = [each for each in running.processes if each.rank != victim]
    if others and {statuses[each.rank] for each in others} == {LOST}:
        named = rf"error: rank {victim} (has ended|did not)"
        are_named = all(re.match(named, "\n".join(each.messages())) for each in others)
        return [] if are_named else [f"said {said}"]
    if set(statuses.values()) == {DEFAULT_ACTION}:
        return []
    is_good = set(statuses.values()) in ({STOPPED}, {0})
    wrong = [] if is_good else [f"statuses {sorted(map(str, statuses.values()))}"]
    return wrong + ([f"said {said[:1]} ... {said[-1:]}"] if said else [])


def resumption(trials: Trials, machine: Machine, place: Place, words: Sequence[str]) -> list[str]:
    """Resume the run; return how it differs from the one without a signal."""
    running = begin(place, machine, words)
    try:
        running.wait(range(machine.processes), 300)
        statuses = [each.process.poll() for each in running.processes]
    finally:
        running.kill()
    if set(statuses) != {0}:
        return [f"resumed with {statuses}: {running.processes[0].messages()[-1:]}"]
    reference = trials.place(f"reference-{machine.target}".replace(":", "-"))
    wrong = []
    if metrics(place) != metrics(reference):
        wrong.append("the metrics differ")
    return wrong + different_arrays(place.path, reference.path)


def metrics(place: Place) -> list[tuple]:
    names = "step", "loss", "grad_norm", "validation_loss", "learning_rate", "targets"
    return [tuple(record.get(name) for name in names) for record in place.journal()]


def different_arrays(one: Path, other: Path) -> list[str]:
    """Return the arrays of the last checkpoint that differ in any bit."""
    directories = [path / "run" / "checkpoints" for path in (one, other)]
    info = read_checkpoint_info(directories[1], STEPS)
    return [
        f"{path} differs"
        for path in info.arrays
        if len({restore_array(each, STEPS, path).tobytes() for each in directories}) > 1
    ]


def run_reference(trials: Trials, machine: Machine) -> None:
    place = trials.place(f"reference-{machine.target}".replace(":", "-"))
    shutil.rmtree(place.path / "run", ignore_errors=True)
    running = begin(place, machine, WORDS)
    running.wait(range(machine.processes), 300)
    assert {each.process.poll() for each in running.processes} == {0}


def main() -> int:
    options = parse()
    trials, counts = make_trials(options.directory), {}
    for machine in map(Machine, options.targets):
        trials.compile(machine)
        start = healthy_start_seconds(trials, machine, ["--set", "run.steps=100000"])
        run_reference(trials, machine)

        def one(index: int, machine: Machine = machine, start: float = start) -> Result:
            kind = options.moments[index % len(options.moments)]
            pick = random.Random(f"{options.seed} {machine.target} {kind} {index}")
            name = f"stop-{machine.target}-{kind}-{options.seed}-{index}".replace(":", "-")
            moment = random_moment(kind, start, pick)
            result = take(trials, machine, name, moment, pick, options.limit)
            outcome = "; ".join(result.wrong) or "good"
            print(f"{name}: {result.what}: {outcome}", file=sys.stderr, flush=True)
            return result

        numbers = range(options.first, options.first + options.times)
        with ThreadPoolExecutor(options.parallel) as pool:
            results = list(pool.map(one, numbers))
        for index, result in zip(numbers, results, strict=True):
            kind = f"{machine.target} {options.moments[index % len(options.moments)]}"
            count = counts.setdefault(kind, Counter(good=0, wrong=0, slowest_seconds=0))
            count["wrong" if result.wrong else "good"] += 1
            count["slowest_seconds"] = max(count["slowest_seconds"], math.ceil(result.seconds))
    print(json.dumps(counts, indent=2))
    return 1 if any(count["wrong"] for count in counts.values()) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs that receive SIGTERM at random moments")
    parser.add_argument("--targets", nargs="+", default=["cpu:1", "cpu:2x1"])
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=MOMENTS)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--parallel", type=int, default=1, help="trials at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=5.0, help="seconds to save and end")
    parser.add_argument("--directory", type=Path, help="for the trials; kept")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
