"""Process that measures with a number of devices, which JAX fixes when it starts.

    python -m graphtrain.api.measuring.worker DEVICES PATIENCE

PATIENCE are the seconds that each measurement may wait for cores at full speed. It writes one JSON
object to stdout, and what it measures next to stderr.
"""

import dataclasses
import json
import sys
from typing import Any

from lowering.machine import host
from lowering.machine.target import Target

_WATCHED_SECONDS = 1.0  # before anything is measured, to know the full speed of the cores


def measured(devices: int, patience: float) -> dict[str, Any]:
    """Measure with a number of devices: everything with one, collectives with several."""
    import lowering.xla.backend as xla
    from graphtrain.api.measuring.timing import SPEED

    host.retain_freed_memory()  # as a run does
    xla.devices(Target("cpu", (devices,)))
    SPEED.granted = patience
    SPEED.watch(_WATCHED_SECONDS)
    return _measured(devices) | {"slow": SPEED.slow_share}


def _measured(devices: int) -> dict[str, Any]:
    if devices > 1:
        from graphtrain.api.measuring.collectives import measure_collectives

        return {"collectives": measure_collectives(devices, _report)}
    return _single_device()


def _single_device() -> dict[str, Any]:
    from graphtrain.api.measuring.loops import measure_functions, measure_streams
    from graphtrain.api.measuring.overheads import measure_overheads
    from graphtrain.api.measuring.products import measure_products

    overheads = measure_overheads(_report)
    call = overheads["step"].seconds
    return {
        "overheads": overheads,
        "products": measure_products(call, _report),
        "memory": measure_streams(call, _report),
        "functions": measure_functions(call, _report),
    }


def _report(subject: str) -> None:
    print(f"measuring {subject}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    found = measured(int(sys.argv[1]), float(sys.argv[2]))
    json.dump(found, sys.stdout, default=dataclasses.asdict)
