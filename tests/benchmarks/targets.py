"""Training steps compiled for machines that are not here: time, memory and size of each.

Every step is compiled in a fresh process, one after the other, by the functions that the compile
workers call; without rounds, since the large ones take a minute.

    python tests/benchmarks/targets.py [--json FILE] [NAME ...]
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measuring import ENVIRONMENT, ROOT, finish

LLAMA_7B, QUICKSTART = ROOT / "examples/llama2-7b.toml", ROOT / "examples/quickstart.toml"
ROWS = {
    "7B on v5p:4x4x4": (LLAMA_7B, "v5p:4x4x4", ()),
    "7B on v5e:16x16": (LLAMA_7B, "v5e:16x16", ("program.mesh={data=4, fsdp=64}",)),
    "7B on h100:64": (LLAMA_7B, "h100:64", ()),
    "7B on b200:8": (LLAMA_7B, "b200:8", ("program.batch.global_batch_size=16",)),
    "3M on v5e:16x16": (QUICKSTART, "v5e:16x16", ("program.mesh={data=16, fsdp=16}",)),
    "3M on h100:8": (QUICKSTART, "h100:8", ()),
    "3M on v4:2x2x2": (QUICKSTART, "v4:2x2x2", ()),
    "3M on tpu7x:2x2x1": (QUICKSTART, "tpu7x:2x2x1", ()),
    "3M on v6e:2x4": (QUICKSTART, "v6e:2x4", ()),
}


def measure(name: str) -> None:
    """Compile once and print what it took."""
    from graphtrain.compile.worker import lower
    from graphtrain.config import load_config
    from graphtrain.config.resolve import resolve
    from lowering.errors import OutOfMemory
    from lowering.xla import backend as xla

    path, target, overrides = ROWS[name]
    program = resolve(load_config(path, _divisible(target, overrides), target).program)
    began = time.perf_counter()
    lowered = lower(program, "train")
    traced = time.perf_counter() - began
    try:
        artifact = xla.compile(lowered)
    except OutOfMemory as error:
        print(json.dumps({"does_not_fit": str(error)}))
        return
    figures = {
        "trace_seconds": round(traced, 2),
        "compile_seconds": artifact.record["compile_seconds"],
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "payload_bytes": len(artifact.payload),
        "device_peak_bytes": artifact.record["memory"]["peak"],
    }
    print(json.dumps(figures))


def _divisible(target: str, overrides: tuple[str, ...]) -> list[str]:
    """The quickstart's 16 sequences, or one for each device where there are more."""
    from lowering.machine.target import Target

    devices = Target.parse(target).devices
    return [f"program.batch.global_batch_size={max(16, devices)}", *overrides]


def measured(name: str) -> dict[str, Any]:
    """The figures of one fresh process."""
    words = [sys.executable, __file__, "--measure", name]
    done = subprocess.run(words, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(ROWS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        return measure(arguments.measure)
    results = {}
    for name in arguments.names:
        results[name] = measured(name)
        print(name, results[name], file=sys.stderr, flush=True)
    return finish({"rows": results}, arguments.json)


if __name__ == "__main__":
    main()
