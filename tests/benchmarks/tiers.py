"""Time that a run waits for its checkpoints, and time to resume from each tier.

The model is a Llama of 34 million parameters, as in train_step.py; its checkpoint has 0.4 GB. It
saves to a RAM disk, and uploads checkpoints and metrics to a real S3 server on this machine.
Printed are

- the seconds that training waits for a save, its share of the time between saves, and how many
  steps apart saves have to be for 2 %;
- the time of the steps while a checkpoint is written and uploaded, beside that of the others;
- the seconds of `checkpoint_restore` of a start with neither tier, with the local one, with the
  local one and the remote one, which is asked for newer checkpoints, and with only the remote one,
  whose objects are also read without a run.

    python tests/benchmarks/tiers.py [--saves 3] [--every 10] [--rounds 2] [--local /dev/shm]
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import ENVIRONMENT, ROOT, finish, summary

sys.path.insert(0, str(ROOT / "tests" / "run"))
from remote_trials import serving  # pyright: ignore[reportMissingImports]
from storage import credentials  # pyright: ignore[reportMissingImports]

from graphtrain.checkpoints.remote import RemoteCheckpoints
from graphtrain.run.goodput.records import Interval, read_processes
from graphtrain.run.metrics import read_journal

URL = "s3://runs/one"
AFTER_SAVE = 5  # steps that are compared with the others
GOAL = 0.02
SETTINGS = """
[program]
target = "cpu:1"
batch = { global_batch_size = 8, seq_len = 256 }

[program.model]
layers = 8
embed = 512
heads = 8
kv_heads = 8
mlp = 1408
vocab = 8192
remat = "none"
unroll = 8
dtype = "float32"

[run]
directory = "run"
steps = 1
report_every = 1000
data = { train = "data/train" }
"""


def graphtrain(directory: Path, *words: str) -> None:
    command = [sys.executable, "-m", "graphtrain", *words]
    done = subprocess.run(
        command, cwd=directory, env=ENVIRONMENT | dict(os.environ), capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    if "warning" in done.stderr:
        print(done.stderr, file=sys.stderr)


def settings(**values: Any) -> list[str]:
    pairs = (("--set", f"{name.replace('__', '.')}={value}") for name, value in values.items())
    return [word for pair in pairs for word in pair]


def intervals(run: Path, activity: str) -> list[Interval]:
    """Of the last start."""
    last = read_processes(run).processes[-1]
    return [one for one in last.intervals if one.activity == activity]


def blocked(run: Path, saves: int, every: int) -> dict[str, Any]:
    """What saves cost that were followed by steps."""
    last = saves * every + every
    by_step: dict[int, float] = {}  # a long wait has several lines
    for one in intervals(run, "save"):
        if one.step < last:
            by_step[one.step] = by_step.get(one.step, 0.0) + one.seconds
    waits = list(by_step.values())
    if len(waits) != saves:
        sys.exit(f"{len(waits)} saves instead of {saves}")
    seconds = {one["step"]: 1 / one["tokens_per_second"] * 2048 for one in read_journal(run)
               if one["step"] > 2}  # fmt: skip
    others = [value for step, value in seconds.items() if not 0 < step % every <= AFTER_SAVE]
    after = (step for step in seconds if step > every and 0 < step % every <= AFTER_SAVE)
    during = [seconds[step] for step in after]
    step, wait = statistics.median(others), statistics.median(waits)
    return {
        "blocked seconds per save": summary(waits),
        "seconds per step, while nothing is written": summary(others),
        f"seconds per step, {AFTER_SAVE} after a save": summary(during),
        "share of the time, as measured": round(wait / (wait + every * step), 4),
        "share of the time, with local_every = 1000": round(wait / (wait + 1000 * step), 6),
        "steps between saves for 2 %": round(wait * (1 / GOAL - 1) / step, 1),
    }


def resumed(directory: Path, run: str, steps: int, *words: str) -> float:
    """Seconds in which a start of one step restores, once what others wrote is on the disk."""
    os.sync()
    named = settings(run__steps=steps, run__directory=run)
    graphtrain(directory, "run", "config.toml", *named, *words)
    return sum(one.seconds for one in intervals(directory / run, "restore"))


def read_objects(step: int) -> dict[str, float]:
    """Seconds and rate of reading the objects of a checkpoint, without a run."""
    remote, started = RemoteCheckpoints(URL), time.monotonic()
    remote.verify(step)
    seconds = time.monotonic() - started
    nbytes = remote.manifest(step).nbytes
    return {"seconds": round(seconds, 3), "MB/s": round(nbytes / seconds / 1e6, 1),
            "MB": round(nbytes / 1e6, 1)}  # fmt: skip


def measure(directory: Path, memory: Path, saves: int, every: int, rounds: int) -> dict[str, Any]:
    (directory / "config.toml").write_text(SETTINGS)
    graphtrain(directory, "data", "sample", "text.jsonl", "--megabytes", "0.3")
    graphtrain(directory, "data", "prepare", "text.jsonl", "--output", "data", "--tokenizer",
               "bytes", "--validation", "0.1")  # fmt: skip
    graphtrain(directory, "compile", "config.toml")
    last = (saves + 1) * every
    remote = settings(run__checkpoints__remote=URL, run__checkpoints__keep=9)
    local = settings(run__checkpoints__local=memory)
    words = settings(run__steps=last, run__checkpoints__local_every=every,
                     run__upload__every_seconds=5.0)  # fmt: skip
    graphtrain(directory, "run", "config.toml", *words, *remote, *local)
    results = blocked(directory / "run", saves, every)
    alone = memory.with_name("alone")
    starts = {
        "plain": ("plain", []),
        "local": ("alone", settings(run__checkpoints__local=alone)),
        "local and remote": ("run", remote + local),
    }
    for run in ("plain", "alone"):
        (directory / run).mkdir()
        for name in ("metrics.jsonl", "goodput.jsonl", "config.toml", "config.record.json"):
            shutil.copy(directory / "run" / name, directory / run)
    for place in (directory / "plain/checkpoints", alone):
        shutil.copytree(memory / str(last), place / str(last))
    times: dict[str, list[float]] = {name: [] for name in starts}
    for step in range(last + 1, last + 1 + rounds):
        for name, (run, words) in starts.items():
            times[name].append(resumed(directory, run, step, *words))
    results["reading the objects alone"] = read_objects(last + rounds)
    times["remote"] = [resumed(directory, "elsewhere", last + rounds + 1, *remote)]
    results["checkpoint_restore seconds"] = {name: summary(all) for name, all in times.items()}
    plain = statistics.median(times["plain"])
    for name in ("local", "local and remote"):
        results[f"{name} over plain"] = round(statistics.median(times[name]) / plain, 2)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Waits for checkpoints, and resumption from each tier."
    )
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--local", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.every <= AFTER_SAVE:
        parser.error(f"--every must be more than {AFTER_SAVE}, the steps that are compared")
    with (
        tempfile.TemporaryDirectory(prefix="tiers-") as place,
        tempfile.TemporaryDirectory(prefix="tiers-", dir=arguments.local) as memory,
    ):
        directory = Path(place)
        (directory / "store/runs").mkdir(parents=True)
        with serving(directory / "store") as server:
            os.environ.update(credentials(server.url))
            counts = arguments.saves, arguments.every, arguments.rounds
            finish(measure(directory, Path(memory) / "run", *counts), arguments.json)


if __name__ == "__main__":
    main()
