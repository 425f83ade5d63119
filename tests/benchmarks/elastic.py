"""Whether a run that loses hosts at random goes on with fewer, and grows again, without compiling.

The quickstart is trained by 4 processes. One of them is killed at a random moment, and the run is
started again with 3 processes, then with 4, and so on. At the end, its losses are compared with
those of a run that was not interrupted. Each process lists what JAX traced and compiled in it.

Other numbers of processes add the same numbers in another order. How much this rounding grows in
training depends on the dtype and on the learning rate, so a third run shows it: not interrupted,
with 4 processes, and in 2 microbatches. The losses of the killed run may differ from those of the
first at most LIMIT times as much. `--dtype float32` makes the comparison strict.

    python tests/benchmarks/elastic.py [--kills 10] [--steps 60] [--dtype float32] [--directory DIR]
"""

import argparse
import json
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
LIMIT = 10.0  # the runs with other rounding are two samples of a chaotic growth
ULP = 2**-23  # of float32, in which losses are reported
COUNTED = ROOT / "tests" / "run" / "counted_compilations.py"


class Trial:
    """One run, its starts and what they took."""

    def __init__(self, place: Place, words: list[str], seed: int) -> None:
        self.place, self.words, self.random = place, words, random.Random(seed)
        self.seconds_to_step: dict[int, list[float]] = {count: [] for count in COUNTS}
        self.events: list[str] = []
        self.statuses: list[list[int]] = []

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

    def kill(self, count: int) -> None:
        """Start the run, kill one process after its next step at random, and wait for the rest."""
        log = self.place.path / "run" / "metrics.jsonl"
        before = log.stat().st_mtime_ns if log.exists() else 0
        saved = [int(one.name) for one in log.parent.glob("checkpoints/*") if one.name.isdigit()]
        resumes_from = max(saved, default=0)  # the steps after it are dropped at the start
        began, processes = time.monotonic(), self.start(count)
        while (
            not log.exists() or log.stat().st_mtime_ns == before or self.last_step() <= resumes_from
        ):
            time.sleep(0.05)
            assert any(one.poll() is None for one in processes), processes[0].communicate()
        self.seconds_to_step[count].append(time.monotonic() - began)
        time.sleep(self.random.uniform(0, 6))
        self.random.choice(processes).kill()
        self.statuses.append(self.wait(processes))

    def wait(self, processes: list[subprocess.Popen[str]]) -> list[int]:
        """Wait until all processes have ended; collect what they compiled."""
        for process in processes:
            process.communicate(timeout=1800)
        for rank in range(len(processes)):
            file = self.place.path / f"{rank}.json"
            if file.exists():  # a killed process writes none
                self.events += json.loads(file.read_text())
                file.unlink()
        return [process.returncode for process in processes]


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
                "run.checkpoints.local_every=1", "run.watchdog.step_timeout=15.0",
                f"program.precision.compute={arguments.dtype}"]  # fmt: skip
    words = [word for one in settings for word in ("--set", one)]
    trial = Trial(place, ["--target", "cpu:4x1", *words], arguments.seed)
    print(place.command("compile", "config.toml", *trial.words)[0], flush=True)
    for number in range(arguments.kills):
        count = COUNTS[number % 2]
        trial.kill(count)
        print(f"kill {number + 1} of {count} processes: step {trial.last_step()}", flush=True)
    last = trial.wait(trial.start(4))
    whole = trial.wait(trial.start(4, "whole"))
    trial.words += ["--set", "program.batch.microbatches=2"]
    place.command("compile", "config.toml", *trial.words)
    rounded = trial.wait(trial.start(4, "rounded"))
    grown = {name: differences(place, name) for name in ("run", "rounded")}
    within = max(grown["run"]) <= LIMIT * max(*grown["rounded"], ULP)
    finish(
        {
            "statuses": trial.statuses,
            "last start, the whole run, and that with other rounding": [last, whole, rounded],
            "compile events": len(trial.events),
            "steps": len(grown["run"]),
            "largest relative difference of a loss": {name: max(of) for name, of in grown.items()},
            "in the first 10 steps": {name: max(of[:10]) for name, of in grown.items()},
            "seconds from a start to its next step": {
                f"{count} processes": summary(seconds)
                for count, seconds in trial.seconds_to_step.items()
            },
        },
        None,
    )
    sys.exit(bool(trial.events) or any(last + whole + rounded) or not within)


if __name__ == "__main__":
    main()
