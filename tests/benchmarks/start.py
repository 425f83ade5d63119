"""Warm start: from the start of a process to its first finished training step.

Ours is the real command, `graphtrain run`; the peer trains the same model by the same step
functions on the same mesh, jitted, from a hit in JAX's persistent cache. Both read their batch from
the same dataset. Each round starts both, one after the other, and takes the time from outside: from
before the process is started until the metrics of step 1 are on the disk. The step is short (8
sequences of 32 tokens), so that starting is what is measured.

    python tests/benchmarks/start.py [--rounds 7] [--json FILE]
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import ENVIRONMENT, finish, summary

_GOAL = 0.6  # ours over the peer

CONFIG = """
[program]
target = "cpu:8"

[program.mesh]
fsdp = 4
tensor = 2

[program.model]
layers = 8
embed = 512
heads = 8
kv_heads = 4
mlp = 1408
vocab = 8192

[program.batch]
sequences = 8
length = 32

[run]
directory = "run"
steps = 1

[run.data]
train = "data/train"
"""


def peer() -> None:
    """The same first step with jax.jit and JAX's persistent cache."""
    import jax
    import numpy as np

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_compilation_cache_dir", "jax-cache")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    from graphtrain.config import load_config
    from graphtrain.requests import mesh_shape
    from graphtrain.steps import build_graph
    from lowering import jax_xla
    from lowering.constrain import placed, sharding
    from lowering.trees import flatten, unflatten
    from sharding_rules.rules import Rules

    program = load_config(Path("config.toml")).program
    rules, shape = Rules.load(program.rules), mesh_shape(program)
    mesh = jax_xla.make_mesh(shape, jax.devices())

    def placements(graph):
        plan = jax_xla.plan_graph(graph, rules, shape)
        return unflatten(
            {path: sharding(plan.layouts[path], mesh) for path in flatten(graph.outputs)}
        )

    tokens = np.memmap("data/train.bin", np.uint16, "r")[: 8 * 33].reshape(8, 33).astype(np.int32)
    batch = {
        "tokens": tokens[None, :, :-1],
        "targets": tokens[None, :, 1:],
        "weights": np.ones((1, 8, 32), np.float32),
    }
    with placed(mesh, rules):
        graph = build_graph(program, "init")
        state = jax.jit(graph.step, out_shardings=placements(graph))(np.uint32(0))["state"]
        graph = build_graph(program, "train")
        train = jax.jit(graph.step, donate_argnums=0, out_shardings=placements(graph))
        metrics = train(state, batch, np.float32(3e-4))["metrics"]
    Path("peer.txt").write_text(f"{float(metrics['loss'])} {float(metrics['grad_norm'])}")


def stages() -> None:
    """Our start, one part after the other (in a run, the loader opens on a thread beside)."""
    marks = [("", time.perf_counter())]

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter()))

    import jax

    mark("import jax")
    import graphtrain.run  # noqa: F401

    mark("import graphtrain.run")
    from graphtrain.cache import Cache
    from graphtrain.config import load_config

    config = load_config(Path("config.toml"))
    mark("read settings")
    import lowering
    from graphtrain.requests import request_keys
    from lowering.target import Target

    target = Target.parse(config.program.target)
    backend = lowering.backend(target)
    backend.devices(target)
    mark("import backend, start 8 devices")
    keys, cache = request_keys(config.program), Cache(Path("cache"))
    mark("keys")
    found = {name: cache.find(keys[name]) for name in ("init", "train", "evaluate")}
    mark("read and check executables")
    loaded = {}
    for name, artifact in found.items():
        loaded[name] = backend.load(artifact, target)
        mark(f"load {name}")
    import orbax.checkpoint  # noqa: F401

    mark("import orbax")
    from graphtrain.data.loader import Loader

    loader = Loader(config.run.data.train, sequences=8, length=32, seed=0, vocab=8192)
    batch = {name: array.reshape(1, 8, 32) for name, array in next(loader).items()}
    mark("import grain, first batch")
    import numpy as np

    state = jax.block_until_ready(loaded["init"](np.uint32(0))["state"])
    mark("init")
    placed = backend.put(batch, loaded["train"].inputs("batch"))
    float(loaded["train"](state, placed, np.float32(3e-4))["metrics"]["loss"])
    mark("first step")
    loader.close()
    parts = {name: round(now - before, 3) for (_, before), (name, now) in itertools.pairwise(marks)}
    Path("stages.json").write_text(json.dumps(parts))


def prepare(directory: Path) -> None:
    """Data, programs and the peer's cache; none of it is timed."""
    (directory / "config.toml").write_text(CONFIG)
    (directory / "data").mkdir()
    import numpy as np

    from graphtrain.data.indexed_writer import IndexedWriter

    random = np.random.default_rng(0)
    with IndexedWriter(directory / "data" / "train", 8192) as writer:
        for _ in range(64):
            writer.append(random.integers(0, 8192, 2048))
        writer.complete()
    started(directory, ["-m", "graphtrain", "compile", "config.toml"], None)
    started(directory, [__file__, "--peer"], None)


def started(directory: Path, words: list[str], until: Path | None) -> float:
    """Seconds from the start of a process until a file has content, or until it ends."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=directory,
        env=ENVIRONMENT | {"GRAPHTRAIN_CACHE": "cache"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    seconds = 0.0
    while until is not None and process.poll() is None and not seconds:
        if until.exists() and until.stat().st_size:
            seconds = time.perf_counter() - began
        time.sleep(0.002)
    _, err = process.communicate()
    if process.returncode or (until is not None and not seconds):
        raise SystemExit(err.decode())
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stages", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer or arguments.stages:
        peer() if arguments.peer else stages()
        return
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).absolute()
        prepare(directory)
        for index in range(arguments.rounds):
            run = f"run{index}"
            words = ["-m", "graphtrain", "run", "config.toml", "--set", f"run.directory={run}"]
            ours.append(started(directory, words, directory / run / "metrics.jsonl"))
            (directory / "peer.txt").unlink()
            theirs.append(started(directory, [__file__, "--peer"], directory / "peer.txt"))
        started(directory, [__file__, "--stages"], None)
        parts = json.loads((directory / "stages.json").read_text())
    ratios = summary([mine / other for mine, other in zip(ours, theirs, strict=True)])
    mine, other = summary(ours), summary(theirs)
    finish(
        {
            "graphtrain_seconds": mine,
            "peer_seconds": other,
            "ratio_of_medians": round(mine["median"] / other["median"], 4),
            "ratio_by_round": ratios,
            "goal": _GOAL,
            "stages_once": parts,
        },
        arguments.json,
    )


if __name__ == "__main__":
    main()
