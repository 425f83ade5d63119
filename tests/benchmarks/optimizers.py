"""Muon beside AdamW: the quickstart's loss, the bytes that an update sends, and the time of a step.

Losses: the quickstart at equal steps, with each of the same peaks of the learning rate for both.
Bytes: by compiled programs for machines that need not be here. Steps: on 8 virtual CPU devices with
at least 100 x embed tokens a step, the programs in turn, each in a process of its own; processor
seconds beside the wall's, because a machine that does other work makes the latter meaningless.

    python tests/benchmarks/optimizers.py [losses] [bytes] [steps] [--kinds ...]
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import ENVIRONMENT, finish, summary
from quickstart_losses import Quickstart

PEAKS = (1.5e-3, 3e-3, 6e-3)
MACHINES: dict[str, dict[str, Any]] = {"h100:8": {"fsdp": 8}, "v5p:2x2x2": {"fsdp": 8}}
MODEL: dict[str, Any] = {"layers": 8, "embed": 1024, "heads": 8, "mlp": 4096, "vocab": 4096}
MOVED = {"muon": "matrices of Muon", "soap": "matrices of SOAP"}
SMALL = 100_000  # bytes: norms, and sums of the loss
TINY: dict[str, Any] = {
    "layers": 8,
    "embed": 256,
    "heads": 4,
    "kv_heads": 4,
    "mlp": 704,
    "vocab": 4096,
}
SEQUENCES, LENGTH = 128, 256  # 128 x embed tokens a step


def losses(kinds: list[str], peaks: list[float], steps: int) -> dict[str, Any]:
    """Validation losses of the quickstart, of each kind with each peak."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        quickstart = Quickstart(folder)
        for kind in kinds:
            common = (
                f"program.optimizer.kind={kind}",
                f"run.steps={steps}",
                "program.precision.compute=bfloat16",
            )
            quickstart.compile(common)
            for peak in peaks:
                rates = f"run.learning_rate.peak={peak}", f"run.learning_rate.minimum={peak / 10}"
                loss = quickstart.loss(f"{kind}-{peak:g}", [*common, *rates])
                found.setdefault(kind, {})[f"{peak:g}"] = round(loss, 4)
    best = {kind: min(of.values()) for kind, of in found.items()}
    return {"steps": steps, "validation_loss": found, "best": best}


def sent_bytes(kinds: list[str]) -> dict[str, Any]:
    """Bytes that a device sends for AdamW's gradients, and more with each other kind."""
    import lowering
    from graphtrain.config.resolve import resolve
    from graphtrain.config.schema import Batch, Mesh, Model, Optimizer, Program
    from graphtrain.graphs.build import build_graph
    from graphtrain.planning.moved import ParameterIndex
    from lowering.hlo.collectives import Collective

    def megabytes(machine: str, kind: str, moved: str) -> float:
        program = resolve(
            Program(
                target=machine,
                mesh=Mesh(**MACHINES[machine]),
                rules=("fsdp",),
                model=Model(**MODEL),
                batch=Batch(global_batch_size=64, seq_len=256),
                optimizer=Optimizer(kind=kind),  # type: ignore[arg-type]
            )
        )
        backend = lowering.backend(program.target)
        graph = build_graph(program, "train")
        lowered = backend.lower(graph, program.rules, program.mesh, program.target)
        record = backend.compile(lowered).record
        index = ParameterIndex(lowered.plan, program.rules)
        found = [Collective.from_record(one) for one in record["collectives"]]
        chosen = [one for one in found if index.classify(one).kind == moved and one.bytes > SMALL]
        return round(sum(one.wire_bytes_per_step for one in chosen) / 1e6, 1)

    results: dict[str, Any] = {}
    for machine in MACHINES:
        gradients = megabytes(machine, "adamw", "gradients")
        results[machine] = {"gradients of adamw, MB": gradients}
        for kind in kinds:
            if kind == "adamw":
                continue
            update = megabytes(machine, kind, MOVED[kind])
            results[machine][f"update of {kind}, MB"] = update
            results[machine][f"{kind} ratio"] = round(update / gradients, 3)
    return results


def step_seconds(kinds: list[str], rounds: int) -> dict[str, Any]:
    """Seconds of a step on 8 virtual devices, the kinds in turn."""
    workers = {kind: _worker(kind) for kind in kinds}
    wall: dict[str, list[float]] = {kind: [] for kind in kinds}
    processor: dict[str, list[float]] = {kind: [] for kind in kinds}
    try:
        for index in range(rounds + 1):
            for kind, process in workers.items():
                assert process.stdin and process.stdout
                process.stdin.write("step\n")
                process.stdin.flush()
                taken = json.loads(process.stdout.readline())
                if index:  # the first is cold
                    wall[kind].append(taken["wall"])
                    processor[kind].append(taken["processor"])
    finally:
        for process in workers.values():
            process.terminate()
    results: dict[str, Any] = {
        kind: {"seconds": summary(wall[kind]), "processor seconds": summary(processor[kind])}
        for kind in kinds
    }
    for kind in kinds[1:]:
        results[f"{kind} / {kinds[0]}"] = {
            name: round(results[kind][name]["median"] / results[kinds[0]][name]["median"], 3)
            for name in ("seconds", "processor seconds")
        }
    return {"tokens a step / embed": SEQUENCES * LENGTH / TINY["embed"], **results}


def _worker(kind: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, "--worker", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        text=True,
    )


def work(kind: str) -> None:
    """Take a step for each line of standard input, and print its seconds."""
    step = _step(kind)
    for _ in sys.stdin:
        before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        step()
        wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(json.dumps({"wall": wall, "processor": used}), flush=True)


def _step(kind: str) -> Callable[[], None]:
    import jax
    import numpy as np

    import lowering
    from graphtrain.config.resolve import resolve
    from graphtrain.config.schema import Batch, Mesh, Model, Optimizer, Program
    from graphtrain.graphs.build import build_graph

    program = resolve(
        Program(
            target="cpu:8",
            mesh=Mesh(data=2, fsdp=4),
            rules=("data", "fsdp"),
            model=Model(**TINY, remat="none"),
            batch=Batch(global_batch_size=SEQUENCES, seq_len=LENGTH),
            optimizer=Optimizer(kind=kind),  # type: ignore[arg-type]
        )
    )
    backend = lowering.backend(program.target)

    def loaded(name: str) -> Any:
        graph = build_graph(program, name)
        lowered = backend.lower(graph, program.rules, program.mesh, program.target)
        return backend.load(backend.compile(lowered), program.target)

    train, state = loaded("train"), loaded("init")(np.uint32(0))["state"]
    random = np.random.default_rng(0)
    described = train.inputs("batch")
    shape = 1, SEQUENCES, LENGTH
    arrays = {
        "tokens": random.integers(0, TINY["vocab"], shape).astype(np.int32),
        "targets": random.integers(0, TINY["vocab"], shape).astype(np.int32),
        "weights": np.ones(shape, np.float32),
    }
    batch = backend.to_devices(arrays, described)

    def step() -> None:
        nonlocal state
        state = train(state, batch, np.float32(1e-3))["state"]
        jax.block_until_ready(state)

    return step


def main() -> None:
    """Measure what is asked for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="losses, bytes, steps; all if none is named")
    parser.add_argument("--kinds", nargs="+", default=["adamw", "muon"])
    parser.add_argument("--peaks", nargs="+", type=float, default=list(PEAKS))
    parser.add_argument("--steps", type=int, default=300, help="of the quickstart")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker")
    given = parser.parse_args()
    if given.worker:
        return work(given.worker)
    parts = given.parts or ["losses", "bytes", "steps"]
    results: dict[str, Any] = {}
    if "bytes" in parts:
        results["bytes"] = sent_bytes(given.kinds)
    if "steps" in parts:
        results["steps"] = step_seconds(given.kinds, given.rounds)
    if "losses" in parts:
        results["losses"] = losses(given.kinds, given.peaks, given.steps)
    finish(results, given.json)
    return None


if __name__ == "__main__":
    main()
