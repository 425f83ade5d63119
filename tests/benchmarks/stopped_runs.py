"""Whether a run that receives SIGTERM at a random moment saves, and resumes bit for bit.

Each trial starts a run, sends SIGTERM to one rank at a random moment, and starts it again until it
is complete. The moment is in the start of the run in one of three trials, else in its steps,
every third of which saves and every fifth evaluates. With --compile the programs are missing, and
the signal comes while they are compiled.

A trial is good if all processes end with status 143 (or 0, if the run was complete before), nothing
is on stderr but steps, the resumed run ends with status 0, and its metrics and the arrays of its
last checkpoint equal those of a run without a signal.

    python tests/benchmarks/stopped_runs.py [--targets cpu:1 cpu:2x1] [--times 20] [--parallel 2]
"""

import argparse
import json
import random
import shutil
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trial_places import Machine, Place, Running, Trials, begin, healthy_start_seconds, make_trials

from graphtrain.checkpoints.checkpoint import read_checkpoint_info, restore_array

STOPPED, DEFAULT_ACTION = 128 + signal.SIGTERM, -signal.SIGTERM
STEPS = 120
SETTINGS = [
    f"run.steps={STEPS}", "run.save_every=3", "run.evaluate_every=5", "run.evaluate_batches=3",
]  # fmt: skip
WORDS = [word for setting in SETTINGS for word in ("--set", setting)]


def wait_for_moment(running: Running, start: float, pick: random.Random, *, compiling: bool) -> str:
    """Wait for a random moment; return what it is."""
    if compiling or pick.random() < 1 / 3:
        seconds = pick.uniform(0, start)
        time.sleep(seconds)
        return f"start + {seconds:.2f} s"
    step, seconds = pick.randint(1, STEPS - 1), pick.uniform(0, 0.05)
    running.wait_for_step(step)
    time.sleep(seconds)
    return f"step {step} + {seconds:.3f} s"


def take(
    trials: Trials, machine: Machine, name: str, start: float, pick: random.Random, compiling: bool
) -> tuple[str, list[str]]:
    """Take a trial; return what it was, and what was wrong."""
    place = trials.place(name)
    words = [*WORDS, *(["--compile"] if compiling else [])]
    if compiling:
        place = Place(place.path, place.path / "cache")
    running = begin(place, machine, words)
    victim = pick.randrange(machine.processes)
    try:
        moment = wait_for_moment(running, start, pick, compiling=compiling)
        running.processes[victim].process.send_signal(signal.SIGTERM)
        running.wait(range(machine.processes), 90)
        wrong = ending(running)
    finally:
        running.kill()
    return f"SIGTERM to rank {victim}, {moment}", wrong or resumption(trials, machine, place, words)


def ending(running: Running) -> list[str]:
    """Return what was wrong with the end of a run that was asked to stop."""
    statuses = {each.process.poll() for each in running.processes}
    said = [message for each in running.processes for message in each.messages()]
    # A signal before Python's handlers are set has its default action; srun would end the others.
    if DEFAULT_ACTION in statuses:
        return []
    wrong = [] if statuses in ({STOPPED}, {0}) else [f"statuses {sorted(map(str, statuses))}"]
    return wrong + ([f"said {said[:1]} ... {said[-1:]}"] if said else [])


def resumption(trials: Trials, machine: Machine, place: Place, words: list[str]) -> list[str]:
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
    parser = argparse.ArgumentParser(description="Runs that receive SIGTERM at random moments")
    parser.add_argument("--targets", nargs="+", default=["cpu:1", "cpu:2x1"])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--parallel", type=int, default=1, help="trials at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="signals while it compiles")
    parser.add_argument("--directory", type=Path, help="for the trials; kept")
    options = parser.parse_args()
    trials, counts = make_trials(options.directory), {}
    for machine in map(Machine, options.targets):
        trials.compile(machine)
        start = healthy_start_seconds(trials, machine, ["--set", "run.steps=100000"])
        run_reference(trials, machine)
        kind = "compile" if options.compile else "run"
        numbers = range(options.first, options.first + options.times)

        def one(
            index: int, machine: Machine = machine, start: float = start, kind: str = kind
        ) -> bool:
            pick = random.Random(f"{options.seed} {machine.target} {kind} {index}")
            name = f"stop-{machine.target}-{kind}-{options.seed}-{index}".replace(":", "-")
            limit = 4 * start if options.compile else start
            what, wrong = take(trials, machine, name, limit, pick, options.compile)
            print(f"{name}: {what}: {'; '.join(wrong) or 'good'}", file=sys.stderr, flush=True)
            return not wrong

        with ThreadPoolExecutor(options.parallel) as pool:
            good = list(pool.map(one, numbers))
        counts[f"{machine.target} {kind}"] = Counter(good=sum(good), wrong=len(good) - sum(good))
    print(json.dumps(counts, indent=2))
    return 1 if any(count["wrong"] for count in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
