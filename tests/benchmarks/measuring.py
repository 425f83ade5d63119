"""What every benchmark prints: the machine, medians with their spread, and ratios."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# The checkout before an installed package, here and in the processes that are measured.
sys.path.insert(0, str(ROOT))
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed has bytecode, too


def machine() -> dict[str, Any]:
    """Versions and processor, without which a figure means nothing."""
    from lowering.machine import host

    return {
        "python": platform.python_version(),
        "jax": metadata.version("jax"),
        "jaxlib": metadata.version("jaxlib"),
        "processor": host.processor()["name"],
        "cores": os.cpu_count(),
    }


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    named = ("median", statistics.median), ("min", min), ("max", max)
    return {name: round(of(seconds), 4) for name, of in named}


def finish(results: Mapping[str, Any], file: Path | None) -> None:
    """Print the results, and write them as JSON if asked."""
    whole = {"machine": machine(), **results}
    print(json.dumps(whole, indent=2))
    if file is not None:
        file.write_text(json.dumps(whole, indent=2) + "\n")
