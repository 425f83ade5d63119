"""Compile time and size of the train graph at 6, 24 and 96 layers.

The layers are one scan, so neither should grow with their number. Every compilation is a fresh
process without any cache, by the functions that the compile workers call; the layer counts take
turns, so that a busy minute of the machine does not fall on one of them. The time compared is that
of XLA alone; tracing is told apart. The sizes are the StableHLO text the compiler is given, the
instructions of the HLO that XLA made of it, and the executable as the cache stores it.

Last, `graphtrain compile` of the quickstart, whose graphs the cache has already: seconds of the
whole process, imports included.

    python tests/benchmarks/compile.py [--rounds 5] [--layers 6 24 96] [--json FILE]
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import ENVIRONMENT, ROOT, finish, summary

_GOAL = 1.2  # most layers over fewest, of the median compile time
_TIMES = ("trace_seconds", "compile_seconds")


def measure(layers: int) -> None:
    """Compile once and print what it took."""
    from graphtrain.compile.worker import lower
    from graphtrain.config.resolve import resolve
    from graphtrain.config.schema import Batch, Mesh, Model, Program
    from lowering.xla import backend as xla

    model = Model(layers=layers, embed=128, heads=4, mlp=352, vocab=1024)
    batch = Batch(global_batch_size=8, seq_len=128)
    began = time.perf_counter()
    lowered = lower(
        resolve(Program(target="cpu:1", mesh=Mesh(), model=model, batch=batch)), "train"
    )
    traced = time.perf_counter() - began
    artifact = xla.compile(lowered)
    sizes = {"stablehlo_bytes": len(lowered.text), "executable_bytes": len(artifact.payload)}
    if "--hlo" in sys.argv:  # compiles again, so only when asked
        text = lowered.handle.compile().as_text()
        sizes["hlo_instructions"] = sum(" = " in line for line in text.splitlines())
    times = dict(zip(_TIMES, (traced, artifact.record["compile_seconds"]), strict=True))
    print(json.dumps(times | sizes))


def measured(layers: int, *, hlo: bool) -> dict[str, Any]:
    """The figures of one fresh process."""
    words = [sys.executable, __file__, "--measure", str(layers), *(["--hlo"] if hlo else [])]
    done = subprocess.run(words, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def second_compile(rounds: int) -> dict[str, Any]:
    """Seconds of the command where there is nothing left to compile."""
    with tempfile.TemporaryDirectory() as store:
        words = ["compile", str(ROOT / "examples/quickstart.toml"), "--cache", store]
        _command(words)
        taken = [_command(words) for _ in range(rounds)]
    passed, used = (summary(one) for one in zip(*taken, strict=True))
    return {"seconds": passed, "processor_seconds_with_imports": used}


def _command(words: list[str]) -> tuple[float, float]:
    """Seconds that pass and seconds of the processor."""
    began, used = time.perf_counter(), _used()
    whole = [sys.executable, "-m", "graphtrain", *words]
    subprocess.run(whole, env=ENVIRONMENT, check=True, capture_output=True)
    return time.perf_counter() - began, _used() - used


def _used() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 24, 96])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--hlo", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
        return
    runs: dict[int, list[dict[str, Any]]] = {layers: [] for layers in arguments.layers}
    for index in range(arguments.rounds):
        for layers, figures in runs.items():
            figures.append(measured(layers, hlo=index == 0))
    results = {
        str(layers): {name: summary([run[name] for run in figures]) for name in _TIMES}
        | {name: figure for name, figure in figures[0].items() if name not in _TIMES}
        for layers, figures in runs.items()
    }
    least, most = runs[min(runs)], runs[max(runs)]
    ratios = [
        more["compile_seconds"] / less["compile_seconds"]
        for less, more in zip(least, most, strict=True)
    ]
    medians = [
        results[str(layers)]["compile_seconds"]["median"] for layers in (max(runs), min(runs))
    ]
    finish(
        {
            "layers": results,
            "ratio_of_medians": round(medians[0] / medians[1], 4),
            "ratio_by_round": summary(ratios),
            "goal": _GOAL,
            "second_compile": second_compile(arguments.rounds),
        },
        arguments.json,
    )


if __name__ == "__main__":
    main()
