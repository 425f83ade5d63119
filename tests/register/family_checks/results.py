"""The file of results, and a sample of the families that passed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results.json"
CHECKS = ("trace", "training", "weights", "fsdp", "tensor", "expert", "stage", "generate")
MAIN_CHECKS = CHECKS[:4]


def read_results() -> dict[str, Any]:
    """Return the results by family, and by check."""
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}


def write_results(results: Mapping[str, Any]) -> None:
    """Replace the file of results, whole or not at all."""
    new = RESULTS.with_suffix(".new")
    new.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    new.replace(RESULTS)


def is_pending(known: Mapping[str, Any], check: str) -> bool:
    """Return whether a family has no result of a check, and can have one."""
    return check not in known and known.get("trace", {"passed": True})["passed"]


def verdict(result: Mapping[str, Any]) -> str:
    """Return yes, refused or no."""
    return "yes" if result["passed"] else "refused" if result.get("refused") else "no"


def sample(count: int) -> list[str]:
    """Return families that passed the main checks, always the same: by the hash of their names."""
    passed = [
        family
        for family, found in read_results().items()
        if all(found.get(check, {}).get("passed") for check in MAIN_CHECKS)
    ]
    return sorted(passed, key=lambda name: hashlib.sha256(name.encode()).digest())[:count]
