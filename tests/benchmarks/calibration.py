"""Predicted beside measured steps on this CPU, after `graphtrain doctor --measure`.

    python tests/benchmarks/calibration.py [--rounds N] [--ranks] [--only NAME] [--json FILE]

Twelve configurations of different sizes, meshes, dtypes, checkpointing and models. Each one is
compiled, planned and trained in a process of its own: the median of five runs of one to four steps,
in processor time of the process and by the clock. Nothing of the time model is fitted to steps;
what was looked at while it was written is marked, the other configurations are held out.

A virtual machine's speed differs between minutes. Runs in which another machine on the host slows a
core are taken again, for two minutes at most; how many were not is in the file. With --rounds 5,
each round measures a new machine profile and then takes every configuration once more; the row has
the medians of rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from measuring import ENVIRONMENT, ROOT, finish

sys.path.insert(0, str(Path(__file__).parents[1] / "graphs"))
from rank_correlation import spearman

RUNS, STEPS = 5, 4  # steps at most
RUN_SECONDS = 1.5  # of a run, if more than one step fits
PATIENCE = 120.0  # seconds that a configuration waits for cores at full speed, runs included
TOLERANCE = 0.15  # of the measured processor time
LLAMA = {"layers": 4, "embed": 192, "heads": 6, "kv_heads": 2, "mlp": 512, "vocab": 4096}
WIDE = {"layers": 4, "embed": 512, "heads": 8, "kv_heads": 8, "mlp": 1408, "vocab": 8192}
GPT = {
    "activation": "gelu",
    "positions": "learned",
    "norm": "layer",
    "max_position_embeddings": 256,
}
MIXTURE = {"moe": {"experts": 8, "experts_per_token": 2}, "vocab": 1024}

# name: target, mesh, model, batch (sequences, length); and the names that were looked at.
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[int, int]]] = {
    "quickstart": ("cpu:2", {"fsdp": 2}, LLAMA | {"remat": "none"}, (16, 128)),
    "quickstart, one device": ("cpu:1", {}, LLAMA | {"remat": "none"}, (16, 128)),
    "wide, bfloat16": ("cpu:1", {}, WIDE | {"remat": "none"}, (4, 256)),
    "wide, float32": ("cpu:1", {}, WIDE | {"remat": "none", "dtype": "float32"}, (4, 256)),
    "mixture, experts on 2": (
        "cpu:4",
        {"data": 2, "expert": 2},
        LLAMA | MIXTURE | {"remat": "dots", "dtype": "float32"},
        (16, 128),
    ),
    "long sequence": ("cpu:1", {}, LLAMA | {"remat": "full", "layers": 2}, (1, 2048)),
    "small, float32": ("cpu:1", {}, LLAMA | {"dtype": "float32", "remat": "dots"}, (8, 128)),
    "GPT-like": ("cpu:1", {}, WIDE | GPT | {"remat": "dots", "vocab": 4096}, (8, 128)),
    "tensor parallel": ("cpu:2", {"tensor": 2}, LLAMA | {"remat": "dots"}, (16, 128)),
    "data and fsdp on 4": (
        "cpu:4",
        {"data": 2, "fsdp": 2},
        LLAMA | {"remat": "full", "dtype": "float32"},
        (16, 128),
    ),
    "mixture, one device": ("cpu:1", {}, LLAMA | MIXTURE | {"remat": "none"}, (8, 128)),
    "imported Llama": ("cpu:2", {"fsdp": 2}, {"hf": str(ROOT / "examples/hf-llama")}, (8, 128)),
}
SEEN = [*list(CONFIGURATIONS)[:6], "imported Llama"]
# Meshes of one model on 4 devices, of which a search would choose one.
MESHES = {
    " x ".join(f"{axis} {size}" for axis, size in mesh.items()): (
        "cpu:4",
        mesh,
        LLAMA | {"remat": "dots"},
        (16, 128),
    )
    for mesh in (
        {"data": 4},
        {"fsdp": 4},
        {"context": 4},
        {"data": 2, "fsdp": 2},
        {"data": 2, "tensor": 2},
        {"fsdp": 2, "tensor": 2},
        {"data": 2, "context": 2},
    )
}


def configuration(name: str) -> str:
    """Return the TOML of a configuration."""
    target, mesh, model, (sequences, length) = (CONFIGURATIONS | MESHES)[name]
    return f"""
[program]
target = "{target}"
mesh = {_table(mesh)}
model = {_table(model)}
batch = {{ global_batch_size = {sequences}, seq_len = {length} }}
[run]
directory = "none"
steps = 1
data = {{ train = "none" }}
"""


def _table(settings: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        return _table(value) if isinstance(value, dict) else json.dumps(value)

    return "{ " + ", ".join(f"{name} = {text(value)}" for name, value in settings.items()) + " }"


class Program:
    """A configuration, compiled and ready to take steps as a run does."""

    def __init__(self, name: str) -> None:
        import numpy as np

        import lowering
        from graphtrain.config import load_config
        from graphtrain.config.resolve import resolve
        from graphtrain.planning.predicted import predicted_time

        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "config.toml"
            file.write_text(configuration(name))
            self.program = resolve(load_config(file, []).program)
        self._backend = lowering.backend(self.program.target)
        self._step = self._loaded("train")
        self.time = predicted_time(self.program, self._step.record)
        self._state = self._loaded("init")(np.uint32(0))["state"]
        self._described = self._step.inputs("batch")
        random = np.random.default_rng(0)
        self._batch = {
            key: np.ones(one.shape, one.dtype)
            if key == "weights"
            else random.integers(0, 1000, one.shape).astype(one.dtype)
            for key, one in self._described.items()
        }

    def _loaded(self, graph: str) -> Any:
        from graphtrain.graphs.build import build_graph

        program, built = self.program, build_graph(self.program, graph)
        lowered = self._backend.lower(built, program.rules, program.mesh, program.target)
        return self._backend.load(self._backend.compile(lowered), program.target)

    def take(self, steps: int) -> tuple[float, float]:
        """Take steps; return processor time and time by the clock of one of them."""
        import numpy as np

        began, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            batch = self._backend.to_devices(self._batch, self._described)
            outputs = self._step(self._state, batch, np.float32(1e-4))
            self._state = outputs["state"]
            float(outputs["metrics"]["loss"])
        return (time.process_time() - used) / steps, (time.perf_counter() - began) / steps


def measure(name: str) -> dict[str, Any]:
    """Compile a configuration, predict its step and take steps, in this process."""
    from graphtrain.api.measuring.core_speed import CoreSpeed
    from lowering.machine import host
    from lowering.machine.memory_pages import use_huge_pages

    host.retain_freed_memory()
    program = Program(name)
    if (predicted := program.time.measured) is None:
        raise SystemExit(f"no profile: {program.time.profile_note}")
    program.take(1)
    if merging := use_huge_pages():
        merging.join()
    _, clock_seconds = program.take(1)
    steps = max(1, min(STEPS, round(RUN_SECONDS / clock_seconds)))
    speed = CoreSpeed(patience=PATIENCE)
    speed.watch(1.0)
    runs = [speed.run(lambda: program.take(steps))[0] for _ in range(RUNS)]
    processor, clock = zip(*runs, strict=True)
    return {
        "slow_runs": speed.slow,
        "source": predicted.source,
        "processor": statistics.median(processor),
        "spread": (max(processor) - min(processor)) / statistics.median(processor),
        "clock": statistics.median(clock),
        "predicted_processor": predicted.total.processor,
        "predicted_clock": predicted.total.clock,
        "products": predicted.products.processor,
        "loops": predicted.loops.processor,
        "communication": sum(one.processor for one in predicted.communication.values()),
    }


def in_process(name: str) -> dict[str, Any]:
    """Measure a configuration in a process of its own, whose devices JAX then fixes."""
    command = [sys.executable, __file__, "--measure", name]
    result = subprocess.run(command, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE)
    if result.returncode:
        raise SystemExit(f"{name}: failed, see above")
    return json.loads(result.stdout.splitlines()[-1])


def measure_machine() -> None:
    """Measure a machine profile, which predictions in this directory then use."""
    command = [sys.executable, "-m", "graphtrain", "doctor", "--measure"]
    result = subprocess.run(command, env=ENVIRONMENT, text=True, capture_output=True)
    if result.returncode:
        raise SystemExit(f"graphtrain doctor --measure failed:\n{result.stderr}")


def measured_in_rounds(names: Iterable[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Return the medians of each configuration over rounds; 0: once, with the profile there is."""
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for index in range(max(rounds, 1)):
        if rounds:
            measure_machine()
        for name, rows in measured.items():
            rows.append(compared(name, in_process(name)))
            print(f"{index + 1}: {table_row(name, rows[-1])}", flush=True)
    return {name: compared(name, medians(rows)) for name, rows in measured.items()}


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of rounds, with the spread of their measured processor time."""
    numbers = [key for key, value in rows[0].items() if type(value) is float]
    result = rows[-1] | {key: statistics.median(row[key] for row in rows) for key in numbers}
    if len(rows) > 1:
        times = [row["processor"] for row in rows]
        result["spread"] = (max(times) - min(times)) / statistics.median(times)
        result["errors"] = [row["error"] for row in rows]
    return result


def compared(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the errors of its predictions."""
    return row | {
        "held_out": name not in SEEN,
        "error": row["predicted_processor"] / row["processor"] - 1,
        "clock_error": row["predicted_clock"] / row["clock"] - 1,
    }


def table_row(name: str, row: dict[str, Any]) -> str:
    """Return a row of the table in docs/BENCHMARKS.md."""
    kind = "held out" if row["held_out"] else "seen"
    used = f"{row['processor']:.3f} | {row['predicted_processor']:.3f} | {row['error']:+.0%}"
    clock = f"{row['clock']:.3f} | {row['predicted_clock']:.3f} | {row['clock_error']:+.0%}"
    return f"| {name} | {kind} | {used} | {clock} | {row['spread']:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", choices=[*CONFIGURATIONS, *MESHES])
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--rounds", type=int, default=0, help="profiles, and runs of each")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    names = arguments.only or (MESHES if arguments.ranks else CONFIGURATIONS)
    rows = measured_in_rounds(names, arguments.rounds)
    if arguments.rounds:
        for name, row in rows.items():
            print(table_row(name, row))
    errors = {name: abs(row["error"]) for name, row in rows.items()}
    within = {name for name, error in errors.items() if error <= TOLERANCE}
    held_out = errors.keys() - {*SEEN}
    summary = {
        "load": os.getloadavg()[0],
        "within": f"{len(within)} of {len(rows)}",
        "held_out_within": f"{len(within & held_out)} of {len(held_out)}",
        "median_error": statistics.median(errors.values()),
    }
    if arguments.ranks:
        summary |= {
            f"rank_correlation_of_{kind}": spearman(
                [row[kind] for row in rows.values()],
                [row[f"predicted_{kind}"] for row in rows.values()],
            )
            for kind in ("processor", "clock")
        }
    finish(summary | {"rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
