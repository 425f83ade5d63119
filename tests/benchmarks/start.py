"""From the start of a process to its first finished training step, warm: ours and its peers.

Ours is the real command, `graphtrain run`, whose first step is finished when its metrics are on
the disk. The peers take the step on a model of the same shape and a batch of the same size: JAX
with a hit in its persistent cache (our model and step, jitted), Hugging Face's Trainer with
torch.compile and a warm Inductor cache, and MaxText with its JAX cache, if --maxtext names the
Python of an environment that has it. Each round starts all of them, one after the other. The step
is short, 8 sequences of 32 tokens, so that starting is what is measured; making weights and taking
the step are part of it on every side, and the breakdowns show them.

Seconds are of the clock; processor seconds are those of the process and its threads until then.

    python tests/benchmarks/start.py [--rounds 7] [--size 1B] [--json FILE]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from measuring import ENVIRONMENT, finish, summary

PEERS = Path(__file__).parent / "peers"
GOALS = {"jax": 0.5, "trainer": 0.3}  # ours over the peer
SEQUENCES, LENGTH = 8, 32
SIZES = {
    "32M": {"layers": 8, "embed": 512, "heads": 8, "kv_heads": 4, "mlp": 1408, "vocab": 8192},
    "0.5B": {"layers": 16, "embed": 1536, "heads": 12, "kv_heads": 4, "mlp": 4096, "vocab": 32000},
    "1B": {"layers": 16, "embed": 2048, "heads": 32, "kv_heads": 8, "mlp": 8192, "vocab": 16000},
}


def config(size: str, devices: int) -> str:
    model = "\n".join(f"{name} = {value}" for name, value in SIZES[size].items())
    return f"""
[program]
target = "cpu:{devices}"
[program.mesh]
fsdp = {devices}
[program.model]
{model}
[program.batch]
global_batch_size = {SEQUENCES}
seq_len = {LENGTH}
[run]
directory = "run"
steps = 1
[run.checkpoints]
local_every = 1000000

[run.data]
train = "data/train"
"""


def prepare(directory: Path, size: str, devices: int) -> None:
    """Settings, data and our programs."""
    (directory / "config.toml").write_text(config(size, devices))
    (directory / "model.json").write_text(json.dumps(SIZES[size]))
    (directory / "data").mkdir()
    import numpy as np

    from graphtrain.data.indexed.writer import IndexedWriter

    random = np.random.default_rng(0)
    with IndexedWriter(directory / "data" / "train", SIZES[size]["vocab"]) as writer:
        for _ in range(64):
            writer.append(random.integers(0, SIZES[size]["vocab"], 2048))
        writer.complete()
    words = [sys.executable, "-m", "graphtrain", "compile", "config.toml"]
    subprocess.run(words, cwd=directory, env=_environment(), check=True, capture_output=True)


def _environment() -> dict[str, str]:
    return ENVIRONMENT | {"GRAPHTRAIN_CACHE": "cache", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


@dataclass
class Contestant:
    """A command, and how to tell that its first step is finished."""

    words: Callable[[str], list[str]]  # of the name of a turn
    result: str  # a file; its name may hold {turn}
    holds: str  # what the file then holds
    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)

    def warm_up(self, directory: Path) -> None:
        """Run it to its end, so that it has filled its cache."""
        self._start(directory, "warm").wait()

    def take_turn(self, directory: Path, turn: str) -> None:
        """Measure it until its first step is finished, and end it: the rest does not count."""
        began = time.perf_counter()
        process = self._start(directory, turn)
        self.seconds.append(time.perf_counter() - began)
        self.processor_seconds.append(_processor_seconds(process.pid))
        process.kill()
        process.wait()

    def _start(self, directory: Path, turn: str) -> subprocess.Popen:
        words, log = self.words(turn), directory / f"{turn}.log"
        result = directory / self.result.format(turn=turn)
        with log.open("w") as output:
            process = subprocess.Popen(
                words, cwd=directory, env=_environment(), stdout=output, stderr=output
            )
        while not self._finished(result):
            if process.poll() is not None and not self._finished(result):
                raise SystemExit(f"{' '.join(words)}\n{log.read_text()[-3000:]}")
            time.sleep(0.002)
        return process

    def _finished(self, result: Path) -> bool:
        return result.exists() and self.holds in result.read_text()


def _processor_seconds(process: int) -> float:
    """Of all threads of a process that has not been waited for. Source: proc_pid_stat(5)"""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def contestants(size: str, maxtext: str | None) -> dict[str, Contestant]:
    def graphtrain(turn: str) -> list[str]:
        words = [sys.executable, "-m", "graphtrain", "run", "config.toml"]
        return [*words, "--set", f"run.directory={turn}"]

    def peer(name: str) -> Contestant:
        def words(turn: str) -> list[str]:
            return [sys.executable, str(PEERS / f"start_{name}.py"), f"{name}-{turn}.json"]

        return Contestant(words, f"{name}-{{turn}}.json", "}}")

    def of_maxtext(turn: str) -> list[str]:
        assert maxtext is not None
        return [maxtext, "-m", "maxtext.trainers.pre_train.train", *maxtext_settings(size, turn)]

    found = {
        "graphtrain": Contestant(graphtrain, "{turn}/metrics.jsonl", "}"),
        "jax": peer("jax"),
        "trainer": peer("trainer"),
    }
    if maxtext is not None:
        found["maxtext"] = Contestant(of_maxtext, "{turn}.log", "completed step: 0")
    return found


def maxtext_settings(size: str, turn: str) -> list[str]:
    """The same shapes on one processor, made-up data, no checkpoints and no cloud."""
    model = SIZES[size]
    settings = {
        "run_name": turn,
        "base_output_directory": "maxtext",
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "jax_cache_dir": "maxtext-cache",
        "dataset_type": "synthetic",
        "enable_checkpointing": False,
        "enable_tensorboard": False,
        "attention": "dot_product",
        "remat_policy": "minimal",
        "base_emb_dim": model["embed"],
        "base_num_query_heads": model["heads"],
        "base_num_kv_heads": model["kv_heads"],
        "head_dim": model["embed"] // model["heads"],
        "base_mlp_dim": model["mlp"],
        "base_num_decoder_layers": model["layers"],
        "vocab_size": model["vocab"],
        "max_target_length": LENGTH,
        "per_device_batch_size": SEQUENCES,
        "steps": 1,
    }
    return [f"{name}={value}" for name, value in settings.items()]


def stages() -> None:
    """Our start, one part after the other; in a run, init computes while others get ready."""
    sys.path.insert(0, str(PEERS))
    from marks import Marks

    from lowering.machine import startup

    startup.pause_garbage_collection()
    startup.skip_blas_threads()
    marks = Marks()
    from lowering.machine import host

    host.retain_freed_memory()
    from graphtrain.cache import Cache
    from graphtrain.config import load_config

    settings = load_config(Path("config.toml"))
    marks.mark("read settings")
    import jax
    import numpy as np

    marks.mark("import jax")
    import graphtrain.run.train  # noqa: F401
    import lowering
    from graphtrain.compile.request_keys import request_keys
    from graphtrain.config.resolve import resolve

    program = resolve(settings.program)
    target = program.target
    backend = lowering.backend(target)
    marks.mark("import graphtrain.run.train")
    backend.devices(target)
    marks.mark("devices")
    keys, cache = request_keys(program), Cache(Path("cache"))
    found = {name: cache.get_by_request(keys[name]) for name in ("init", "train")}
    marks.mark("find and check executables")
    loaded = {name: backend.load(artifact, target) for name, artifact in found.items()}
    marks.mark("load executables")
    from graphtrain.data.batches.loader import Loader

    shape = {"global_batch_size": SEQUENCES, "seq_len": LENGTH}
    loader = Loader(settings.run.data.train, seed=0, **shape)
    batch = {name: array[None] for name, array in next(loader).items()}
    marks.mark("import grain, first batch")
    state = jax.block_until_ready(loaded["init"](np.uint32(0))["state"])
    marks.mark("init")
    placed = backend.to_devices(batch, loaded["train"].inputs("batch"))
    loss = float(loaded["train"](state, placed, np.float32(3e-4))["metrics"]["loss"])
    marks.mark("the step")
    loader.close()
    marks.finish(loss)


def help_seconds(rounds: int) -> dict[str, Any]:
    """Of `graphtrain --help`, from start to end."""
    passed, used = [], []
    for _ in range(rounds):
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        words = [sys.executable, "-m", "graphtrain", "--help"]
        subprocess.run(words, env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=True)
        passed.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {"seconds": summary(passed), "processor_seconds": summary(used), "goal": 0.15}


def _parts(directory: Path, name: str) -> dict[str, list[float]]:
    return json.loads((directory / name).read_text())["parts"]


def compare(mine: Contestant, other: Contestant) -> dict[str, Any]:
    pairs = zip(mine.seconds, other.seconds, strict=True)
    used = zip(mine.processor_seconds, other.processor_seconds, strict=True)
    return {
        "ratio": round(summary(mine.seconds)["median"] / summary(other.seconds)["median"], 3),
        "ratio_by_round": summary([one / another for one, another in pairs]),
        "ratio_of_processor_seconds_by_round": summary([one / another for one, another in used]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", choices=SIZES, default="32M")
    parser.add_argument("--devices", type=int, default=1, help="that the processor is split into")
    parser.add_argument("--without", action="append", default=[], choices=["jax", "trainer"])
    parser.add_argument("--maxtext", help="the Python of an environment with MaxText")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stages", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stages:
        sys.argv[1] = arguments.stages
        stages()
        return
    every = contestants(arguments.size, arguments.maxtext)
    every = {name: one for name, one in every.items() if name not in arguments.without}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).absolute()
        prepare(directory, arguments.size, arguments.devices)
        for one in list(every.values())[1:]:
            one.warm_up(directory)
        for index in range(arguments.rounds):
            for one in every.values():
                one.take_turn(directory, f"round{index}")
        words = [sys.executable, __file__, "--stages", "stages.json"]
        subprocess.run(words, cwd=directory, env=_environment(), check=True)
        last = f"round{arguments.rounds - 1}.json"
        parts = {"graphtrain, once, in turn": _parts(directory, "stages.json")} | {
            name: _parts(directory, f"{name}-{last}") for name in every if name in GOALS
        }
    mine = every["graphtrain"]
    of_trainer = ("torch", "transformers") if "trainer" in every else ()
    results = {
        **{name: metadata.version(name) for name in of_trainer},
        "packages": len(list(metadata.distributions())),  # JAX looks at all while it is imported
        "size": arguments.size,
        "devices": arguments.devices,
        "goals": GOALS,
        "seconds": {name: summary(one.seconds) for name, one in every.items()},
        "processor_seconds": {name: summary(one.processor_seconds) for name, one in every.items()},
        "graphtrain_over": {
            name: compare(mine, one) for name, one in every.items() if one is not mine
        },
        "seconds_and_processor_seconds_of_parts": parts,
        "help": help_seconds(arguments.rounds),
    }
    finish(results, arguments.json)


if __name__ == "__main__":
    main()
