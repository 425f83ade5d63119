"""Weak scaling of the plan: training steps compiled for 8 to 4,096 devices, none of which is here.

One sequence of 4,096 tokens for each device. Every step is traced, lowered and compiled in a fresh
process by the functions that the compile workers call, one after the other. Times are seconds of
the processor, of all threads. A refusal for want of memory is a result too.

    python tests/benchmarks/scale.py [--json FILE] [--devices 8 64 512 4096] [NAME ...]
    python tests/benchmarks/scale.py --json FILE --table --plot docs/figures/scale.svg

Rows that FILE holds already are not compiled again. --plot draws them all; --table prints them.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from measuring import ENVIRONMENT, finish

SEVEN = {"layers": 32, "embed": 4096, "heads": 32, "mlp": 11008, "vocab": 32000, "remat": "full"}
SEVENTY = SEVEN | {"layers": 80, "embed": 8192, "heads": 64, "kv_heads": 8, "mlp": 28672}
SHARDED, SPLIT = ("data", "fsdp"), ("data", "fsdp", "tensor", "sequence")
STAGED = ("data", "tensor", "sequence", "pipeline", "zero1")
LENGTH = 4096
TORUS = {8: "2x2x2", 64: "4x4x4", 512: "8x8x8", 4096: "16x16x16"}
TIMES = ("trace_seconds", "lower_seconds", "compile_seconds", "read_seconds")
# model, mesh, rules, machine
ROWS = {
    "7B fsdp": (SEVEN, {"fsdp": "rest"}, SHARDED, "h100"),
    "7B data x fsdp 8": (SEVEN, {"data": "rest", "fsdp": 8}, SHARDED, "h100"),
    "7B fsdp x tensor 8": (SEVEN, {"fsdp": "rest", "tensor": 8}, SPLIT, "h100"),
    "70B fsdp": (SEVENTY, {"fsdp": "rest"}, SHARDED, "h100"),
    "70B fsdp x tensor 8": (SEVENTY, {"fsdp": "rest", "tensor": 8}, SPLIT, "h100"),
    "70B stage 8 x tensor 8": (SEVENTY, {"data": "rest", "stage": 8, "tensor": 8}, STAGED, "h100"),
    "7B fsdp, v5p": (SEVEN, {"fsdp": "rest"}, SHARDED, "v5p"),
}


def program(name: str, devices: int) -> Any:
    """The settings of a row at a size."""
    from graphtrain.config.schema import Batch, Mesh, Model, PipelineSettings, Program

    model, mesh, rules, chip = ROWS[name]
    staged = "stage" in mesh
    return Program(
        target=f"{chip}:{TORUS[devices] if chip == 'v5p' else devices}",
        mesh=Mesh(**mesh),
        rules=rules,
        model=Model(**model),
        batch=Batch(global_batch_size=devices, seq_len=LENGTH, microbatches=32 if staged else 1),
        pipeline=PipelineSettings(schedule="1f1b") if staged else PipelineSettings(),
    )


def smallest(name: str) -> int:
    """The devices without which a row has no mesh."""
    return math.prod(size for size in ROWS[name][1].values() if isinstance(size, int))


def measure(name: str, devices: int) -> None:
    """Compile once and print what it took."""
    from graphtrain.compile import worker
    from graphtrain.config.resolve import resolve
    from graphtrain.graphs.plan import plan_program
    from graphtrain.planning.assess import estimate
    from lowering.errors import OutOfMemory
    from lowering.xla import backend as xla

    of = resolve(program(name, devices))
    ends, texts = _ends_of_phases(), _texts_read()
    worker.build_graph(of, "evaluate")  # what the first of all graphs imports is not the phases'
    began = time.process_time()
    lowered = worker.lower(of, "train")
    lowered_at = time.process_time()
    figures: dict[str, Any] = {
        "trace_seconds": ends["trace"] - began,
        "lower_seconds": lowered_at - ends["trace"],
        "stablehlo_bytes": len(lowered.text),
    }
    try:
        artifact = xla.compile(lowered)
    except OutOfMemory as error:
        print(json.dumps(figures | {"refused": str(error).partition("\n")[0]}))
        return
    figures |= {
        "compile_seconds": ends["compile"] - lowered_at,
        "read_seconds": time.process_time() - ends["compile"],
        "payload_bytes": len(artifact.payload),
        "record_bytes": len(json.dumps(artifact.record)),
        "hlo_bytes": len(texts[0]),
        "hlo_instructions": sum(" = " in line for line in texts[0].splitlines()),
        "peak_bytes": artifact.record["memory"]["peak"],
        "capacity_bytes": lowered.target.memory_bytes,
        "wire_bytes": _by_axes(artifact.record["collectives"]),
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    began = time.process_time()
    estimate(of, plan_program(of))
    print(json.dumps(figures | {"estimate_seconds": time.process_time() - began}))


def _ends_of_phases() -> dict[str, float]:
    """Filled, as JAX goes on, with the processor's seconds at the end of each phase."""
    from jax import monitoring

    ends, longest = {}, Counter()
    phases = {
        "/jax/core/compile/jaxpr_trace_duration": "trace",
        "/jax/core/compile/backend_compile_duration": "compile",
    }

    def note(event: str, seconds: float, **_: Any) -> None:
        phase = phases.get(event)
        if phase and seconds > longest[phase]:  # functions inside are traced inside
            longest[phase] = seconds
            ends[phase] = time.process_time()

    monitoring.register_event_duration_secs_listener(note)
    return ends


def _texts_read() -> list[str]:
    """Filled with the optimized programs as they are read for the record."""
    from lowering.xla import backend as xla

    texts, read = [], xla.read

    def keep(text: str, *rest: Any) -> Any:
        texts.append(text)
        return read(text, *rest)

    xla.read = keep
    return texts


def _by_axes(collectives: list[dict[str, Any]]) -> dict[str, float]:
    """Bytes that a device sends in a step, by mesh axes."""
    from lowering.hlo.collectives import Collective

    sent: Counter[str] = Counter()
    for each in map(Collective.from_record, collectives):
        sent[" x ".join(each.axes)] += each.wire_bytes_per_step
    return dict(sent)


def measured(name: str, devices: int) -> dict[str, Any]:
    """The figures of one fresh process, or why there are none."""
    words = [sys.executable, __file__, "--measure", name, "--devices", str(devices)]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def show(rows: dict[str, Any], file: Path | None) -> None:
    """Print the rows as a table in Markdown, and draw them."""
    sizes = "StableHLO | instructions | executable | of a device | sent in a step"
    print(f"| step | devices | trace | lower | XLA | read | {sizes} |")
    print("|" + "---|" * 11)
    told = [
        (name, int(devices), figures)
        for name, sizes in rows.items()
        for devices, figures in sizes.items()
        if "peak_bytes" in figures
    ]
    for name, devices, of in told:
        times = " | ".join(f"{of[each]:.1f}" for each in TIMES)
        sent = sorted((axes, size / 1e9) for axes, size in of["wire_bytes"].items() if size > 5e7)
        sizes = f"{of['stablehlo_bytes'] / 1e3:.0f} kB | {of['hlo_instructions']:,}"
        print(
            f"| {name} | {devices:,} | {times} | {sizes} | {of['payload_bytes'] / 1e6:.1f} MB | "
            f"{of['peak_bytes'] / 1e9:.1f} GB | "
            f"{', '.join(f'{axes} {size:.1f} GB' for axes, size in sent)} |"
        )
    if file:
        file.write_text(drawn(told))


def drawn(told: list[tuple[str, int, dict[str, Any]]]) -> str:
    """A figure as SVG: seconds, instructions and memory over the number of devices."""
    import vl_convert

    quantities = {
        "compile: seconds of the processor": ("compile_seconds", 1),
        "HLO instructions": ("hlo_instructions", 1),
        "peak of a device, GB": ("peak_bytes", 1e9),
    }
    points = [
        {"step": name, "devices": devices, "value": of[key] / unit, "what": what}
        for name, devices, of in told
        for what, (key, unit) in quantities.items()
    ]

    def panel(what: str) -> dict[str, Any]:
        sizes, ticks = {"type": "log", "base": 8}, {"values": [8, 64, 512, 4096]}
        across = {"field": "devices", "type": "quantitative", "scale": sizes, "axis": ticks}
        upward = {"field": "value", "type": "quantitative", "title": what}
        return {
            "data": {"values": [point for point in points if point["what"] == what]},
            "mark": {"type": "line", "point": True},
            "encoding": {
                "x": across,
                "y": upward | {"scale": {"type": "log"}, "axis": {"grid": False, "tickCount": 4}},
                "color": {"field": "step", "type": "nominal", "title": None},
            },
        }

    return vl_convert.vegalite_to_svg({"hconcat": [panel(what) for what in quantities]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(ROWS))
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure, arguments.devices[0])
        return
    file = arguments.json
    rows = json.loads(file.read_text())["rows"] if file and file.exists() else {}
    if arguments.table or arguments.plot:
        show(rows, arguments.plot)
        return
    for name in arguments.names:
        for devices in arguments.devices:
            if devices < smallest(name):
                continue
            found = rows.setdefault(name, {})
            if str(devices) not in found:
                found[str(devices)] = measured(name, devices)
                print(name, devices, found[str(devices)], file=sys.stderr, flush=True)
                if file:
                    file.write_text(json.dumps({"rows": rows}))
    finish({"rows": rows}, file)


if __name__ == "__main__":
    main()
