"""Whether a run that loses hosts at random goes on with fewer, and grows again, without compiling.

The quickstart is trained by 4 processes. One of them is killed after a random number of steps, and
the run is started again with 3 processes, then with 4, and so on. At the end, its losses are
compared with those of a run that was not interrupted. Each process lists what JAX traced and
compiled in it.

Other numbers of processes add the same numbers in another order. How much this rounding grows in
training depends on the dtype and on the learning rate, so a third run shows it: not interrupted,
with 4 processes, and in 2 microbatches. The losses of the killed run may differ from those of the
first at most LIMIT times as much. `--dtype float32` makes the comparison strict.

    python tests/benchmarks/elastic.py [--kills 10] [--steps 60] [--dtype float32] [--directory DIR]

With --directory, a trial that was interrupted goes on where it was; --minutes ends it for now.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import ROOT, finish, summary

sys.path.insert(0, str(ROOT / "tests" / "run"))
from places import Place, meeting_address  # pyright: ignore[reportMissingImports]

COUNTS = 4, 3
SECONDS = 30.0  # from a start to the next step, at most
LIMIT = 10.0  # the runs with other rounding are two samples of a chaotic growth
ULP = 2**-23  # of float32, in which losses are reported
COUNTED = ROOT / "tests" / "run" / "counted_compilations.py"


class Trial:
    """One run, its starts and what they took.

    Args:
        place: Where it trains.
        words: Options of the command.
        seed: Of the kills.
        most_steps: Steps after the first one of a start until it is killed, at most.
    """

    def __init__(self, place: Place, words: list[str], seed: int, most_steps: int) -> None:
        self.place, self.words, self.most_steps = place, words, most_steps
        self._file = place.path / "trial.json"
        self.seconds_to_step: dict[int, list[float]] = {count: [] for count in COUNTS}
        self.loads: list[float] = []
        self.events: list[str] = []
        self.statuses: dict[str, list[int]] = {}
        if self._file.exists():
            record = json.loads(self._file.read_text())
            seconds = record.pop("seconds_to_step")
            self.seconds_to_step = {int(count): times for count, times in seconds.items()}
            self.loads, self.events = record["loads"], record["events"]
            self.statuses = record["statuses"]
        self.random = random.Random(f"{seed} {len(self.statuses)}")

    def keep(self, name: str, statuses: list[int]) -> None:
        """Keep what a start took and how its processes ended, for when the trial is interrupted."""
        self.statuses[name] = statuses
        record = {name: getattr(self, name)
                  for name in ("seconds_to_step", "loads", "events", "statuses")}  # fmt: skip
        self._file.write_text(json.dumps(record))

    def start(self, count: int, directory: str = "run") -> list[subprocess.Popen[str]]:
        """Begin the processes of the run; they train in a directory."""
        options = [*self.words, "--set", f"run.directory={directory}", "--quiet"]
        options += ["--coordinator", meeting_address(), "--processes", str(count), "--rank"]
        return [
            self.place.start_python(
                str(COUNTED), f"{rank}.json", "run", "config.toml", *options, str(rank)
            )
            for rank in range(count)
        ]

    def last_step(self) -> int:
        """Return the last step that the run has recorded."""
        curve = self.place.curve()
        return curve[-1][0] if curve else 0

    def kill(self, name: str, count: int) -> None:
        """Start the run, kill one process some steps later, and wait for the rest."""
        log = self.place.path / "run" / "metrics.jsonl"
        before = log.stat().st_mtime_ns if log.exists() else 0
        saved = [int(one.name) for one in log.parent.glob("checkpoints/*") if one.name.isdigit()]
        resumes_from = max(saved, default=0)  # the steps after it are dropped at the start
        began, processes = time.monotonic(), self.start(count)
        while (
            not log.exists() or log.stat().st_mtime_ns == before or self.last_step() <= resumes_from
        ):
            _check_alive(processes)
        self.seconds_to_step[count].append(time.monotonic() - began)
        self.loads.append(os.getloadavg()[0])
        last = self.last_step() + self.random.randint(0, self.most_steps)
        while self.last_step() < last:
            _check_alive(processes)
        time.sleep(self.random.uniform(0, 0.2))  # at any place of a step
        self.random.choice(processes).kill()
        self.keep(name, self.wait(processes))

    def train(self, name: str) -> None:
        """Train to the end with 4 processes, unless that was done."""
        if name not in self.statuses:
            self.keep(name, self.wait(self.start(COUNTS[0], name)))

    def wait(self, processes: list[subprocess.Popen[str]]) -> list[int]:
        """Wait until all processes have ended; collect what they compiled."""
        for process in processes:
            process.communicate(timeout=1800)
        for rank in range(len(processes)):
            file = self.place.path / f"{rank}.json"
            self.events += json.loads(file.read_text())
            file.unlink()
        return [process.returncode for process in processes]


def _check_alive(processes: list[subprocess.Popen[str]]) -> None:
    time.sleep(0.05)
    assert any(one.poll() is None for one in processes), processes[0].communicate()


def differences(place: Place, directory: str) -> list[float]:
    """Return the relative difference of each loss of a run from that of the whole run."""
    pairs = zip(place.curve(directory), place.curve("whole"), strict=True)
    return [abs(mine[1] / other[1] - 1) for mine, other in pairs]


def main() -> None:
    """Run the trial, and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no start begins")
    arguments = parser.parse_args()
    path = arguments.directory or Path(tempfile.mkdtemp(prefix="elastic-"))
    path.mkdir(parents=True, exist_ok=True)
    place = Place(path, path / "cache")
    (path / "config.toml").write_bytes((ROOT / "examples" / "quickstart.toml").read_bytes())
    if not (path / "data").exists():
        place.command("data", "sample", "text.jsonl")
        words = ["--output", "data/quickstart", "--tokenizer", "sentencepiece:4096"]
        place.command("data", "prepare", "text.jsonl", *words)
    settings = [f"run.steps={arguments.steps}", "run.fallback=[3]", "run.report_every=1",
                "run.checkpoints.local_every=1", "run.watchdog.step_timeout=60.0",
                f"program.precision.compute={arguments.dtype}"]  # fmt: skip
    words = ["--target", "cpu:4x1", *(word for one in settings for word in ("--set", one))]
    most_steps = arguments.steps // arguments.kills - 3  # so that the last start is not complete
    if most_steps < 1:
        parser.error("--steps must be at least four times --kills")
    trial = Trial(place, words, arguments.seed, most_steps)
    if not trial.statuses:
        print(place.command("compile", "config.toml", *trial.words)[0], flush=True)
    deadline = time.monotonic() + 60 * arguments.minutes
    for number in range(arguments.kills):
        if (name := f"kill {number + 1}") not in trial.statuses:
            trial.kill(name, COUNTS[number % 2])
            print(f"{name} of {COUNTS[number % 2]}: step {trial.last_step()}", flush=True)
        _stop_after(deadline)
    for name in ("run", "whole"):
        trial.train(name)
        _stop_after(deadline)
    trial.words += ["--set", "program.batch.microbatches=2"]
    place.command("compile", "config.toml", *trial.words)
    trial.train("rounded")
    report(trial)


def _stop_after(deadline: float) -> None:
    if time.monotonic() > deadline:
        sys.exit("not complete; the same command goes on")


def report(trial: Trial) -> None:
    """Print the results; end with status 1 if one is not as it has to be."""
    runs = "run", "whole", "rounded"
    grown = {name: differences(trial.place, name) for name in ("run", "rounded")}
    slowest = max(second for times in trial.seconds_to_step.values() for second in times)
    is_as_expected = {
        "no compile event": not trial.events,
        "runs end with status 0": not any(any(trial.statuses[name]) for name in runs),
        "losses within rounding": max(grown["run"]) <= LIMIT * max(*grown["rounded"], ULP),
        f"next step within {SECONDS:.0f} s": slowest <= SECONDS,
    }
    finish(
        {
            "statuses": trial.statuses,
            "compile events": len(trial.events),
            "steps": len(grown["run"]),
            "largest relative difference of a loss": {name: max(of) for name, of in grown.items()},
            "in the first 10 steps": {name: max(of[:10]) for name, of in grown.items()},
            "seconds from a start to its next step": {
                f"{count} processes": summary(seconds)
                for count, seconds in trial.seconds_to_step.items()
            },
            "load average at these steps": summary(trial.loads),
            "as expected": is_as_expected,
        },
        None,
    )
    sys.exit(not all(is_as_expected.values()))


if __name__ == "__main__":
    main()
