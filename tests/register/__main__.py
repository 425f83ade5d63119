"""Make the register: check every causal family of transformers, each in a process of its own.

    python tests/register [--only FAMILY ...] [--checks CHECK ...] [--again]

Results are kept in tests/register/results.json after each family, so that a run continues where the
last one ended; --again checks families anew. docs/site/reference.py makes the page from them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
CHECKS = ("trace", "training", "weights", "fsdp", "tensor", "expert", "stage", "generate")
_SLOWEST = ("qwen3_next",)  # come last
_SECONDS, _BYTES = 600, 12 << 30  # of one family: of processor, so that a busy machine judges alike
_DEVICES = 4


def main() -> None:
    """Parse arguments; check families."""
    parser = argparse.ArgumentParser(description="Make the register.")
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="families to check")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=CHECKS, metavar="CHECK")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    arguments = parser.parse_args()
    for family in arguments.only or families():
        known = read_results().get(family, {})
        pending = [
            check for check in arguments.checks if arguments.again or is_pending(known, check)
        ]
        if not pending:
            continue
        found = check(family, pending)
        # The file is read again, since others may have been checked meanwhile.
        results = read_results()
        write_results(results | {family: results.get(family, {}) | found})
        verdicts = " ".join(f"{name}:{verdict(one)}" for name, one in found.items())
        print(f"{family}: {verdicts}", flush=True)


def families() -> list[str]:
    """Return every model_type that AutoModelForCausalLM can build."""
    from transformers.models.auto import modeling_auto

    names = sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return sorted(names, key=lambda name: name in _SLOWEST)


def is_pending(known: dict[str, Any], check: str) -> bool:
    """Return whether a family has no result of a check, and can have one."""
    return check not in known and known.get("trace", {"passed": True})["passed"]


def verdict(result: dict[str, Any]) -> str:
    """Return yes, refused or no."""
    return "yes" if result["passed"] else "refused" if result.get("refused") else "no"


def check(family: str, checks: Sequence[str]) -> dict[str, Any]:
    """Check one family in a process with limits of time and memory."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={_DEVICES}",
        "TRANSFORMERS_OFFLINE": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "family.py"), family, folder, *checks]
        ended = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False, preexec_fn=_limit
        )
    fate = f"the process ended with status {ended.returncode}"
    if ended.returncode == -signal.SIGXCPU:
        fate = f"not finished after {_SECONDS} s of processor"
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"check"')]
    found = {line.pop("check"): line for line in lines}
    missing = [name for name in checks if name not in found]
    if missing and found.get("trace", {"passed": True})["passed"]:
        found[missing[0]] = {"passed": False, "words": fate}
    return found


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (_BYTES, _BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS + 10))


def read_results() -> dict[str, Any]:
    """Return the results by family."""
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}


def write_results(results: dict[str, Any]) -> None:
    """Replace the file of results, whole or not at all."""
    new = RESULTS.with_suffix(".new")
    new.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    new.replace(RESULTS)


if __name__ == "__main__":
    main()
