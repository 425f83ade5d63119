"""Whether every checkpoint that an object store lists as whole is so, bit for bit.

A run saves and uploads a checkpoint every few steps to a real S3 server, through a network that
fails half of the requests. The run or the server is killed at random moments, and started again.
After each kill, every step that the store lists is downloaded, verified, and its arrays are
compared with those of a run without interruptions. At the end the local directory is removed, and
the run is completed in another one from what the store has.

    python tests/benchmarks/remote_checkpoints.py [--saves 100] [--kills 20] [--directory DIR]

With --hosts 2, two processes share no disk: each uploads its part. Some lose their disk with a
kill, and both before the end.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from measuring import ROOT
from trial_places import Machine, make_trials

sys.path.insert(0, str(ROOT / "tests" / "run"))
from places import Place, meeting_address  # pyright: ignore
from remote_trials import URL, Trial, arrays, is_equal, serving  # pyright: ignore
from storage import credentials, failing  # pyright: ignore

_EVERY = 4  # steps between checkpoints
_SERVER_SHARE = 4  # one kill of so many is that of the server


def main() -> None:
    """Run the trial, and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--saves", type=int, default=100)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=2.0, help="until a kill, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    started, trials = time.monotonic(), make_trials(arguments.directory)
    machine = Machine("cpu:1" if arguments.hosts == 1 else f"cpu:{arguments.hosts}x1")
    trials.compile(machine)
    place = trials.place(f"remote-{os.getpid()}")
    words = ["--set", f"run.steps={arguments.saves * _EVERY}",
             "--set", f"run.checkpoints.local_every={_EVERY}", *machine.words]  # fmt: skip
    keep = ["--set", f"run.checkpoints.keep={arguments.saves}"]
    train_reference(place, arguments.hosts, [*words, *keep])
    words += ["--set", f"run.checkpoints.remote_every={_EVERY}"]
    store = place.path / "store"
    (store / "runs").mkdir(parents=True)
    with serving(store) as server, failing(server.url) as network:
        os.environ.update(credentials(network.url))
        trial = Trial(place, server, network, words, arguments.seed, arguments.hosts)
        for number in range(1, arguments.kills + 1):
            is_server = number % _SERVER_SHARE == 0
            (trial.kill_server if is_server else trial.kill_trainer)(arguments.seconds)
            trial.check()
            step = place.journal()[-1]["step"]
            print(f"kill {number}: step {step}, {dict(trial.seen)}", flush=True)
        trial.finish()
        trial.check()
    last = arguments.saves * _EVERY
    if arguments.hosts > 1:
        with serving(store) as server:
            endpoint = ["--endpoint", server.url]
            place.command("checkpoints", "pull", URL, "elsewhere", "--step", str(last), *endpoint)
    ends = [arrays(place.path / name / "checkpoints", last) for name in ("reference", "elsewhere")]
    log = "".join(
        path.read_text() for path in (place.path / "elsewhere").glob("run.log") if path.is_file()
    )
    facts = {
        **trial.seen,
        "requests": dict(network.met),
        "uploaded in the last process": log.count(" uploaded the checkpoint"),
        "end is equal": is_equal(*ends),
        "curve is equal": place.curve("elsewhere") == place.curve("reference"),
        "seconds": round(time.monotonic() - started),
    }
    print(json.dumps(facts))
    sys.exit(bool(trial.seen["wrong"]) or not facts["end is equal"])


def train_reference(place: Place, hosts: int, words: list[str]) -> None:
    """Train without interruptions, into one directory."""
    words = ["run", "config.toml", *words, "--set", "run.directory=reference"]
    words += ["--coordinator", meeting_address(), "--processes", str(hosts), "--rank"]
    processes = [place.start(*words, str(rank)) for rank in range(hosts)]
    told = [process.communicate() for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"the reference was not trained: {told}")


if __name__ == "__main__":
    main()
