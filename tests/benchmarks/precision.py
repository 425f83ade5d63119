"""The quickstart's validation loss in 8 bits, beside the one in bfloat16.

Products in fp8 and int8 are emulated on a CPU, with the same values as on a GPU but for the order
of sums: losses mean something, times do not.

    python tests/benchmarks/precision.py [--compute fp8 int8] [--steps 300]
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from measuring import finish
from quickstart_losses import Quickstart


def losses(computes: list[str], steps: int) -> dict[str, Any]:
    """Validation losses, and how far each is from that of bfloat16."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        quickstart = Quickstart(folder)
        for compute in ("bfloat16", *computes):
            settings = f"program.precision.compute={compute}", f"run.steps={steps}"
            quickstart.compile(settings)
            found[compute] = quickstart.loss(compute, settings)
    apart = {compute: f"{found[compute] / found['bfloat16'] - 1:+.2%}" for compute in computes}
    return {
        "steps": steps,
        "validation_loss": {name: round(loss, 4) for name, loss in found.items()},
        "beside bfloat16": apart,
    }


def main() -> None:
    """Measure what is asked for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compute", nargs="+", default=["fp8", "int8"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    finish(losses(given.compute, given.steps), given.json)


if __name__ == "__main__":
    main()
