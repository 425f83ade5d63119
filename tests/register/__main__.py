"""Make the register: check every causal family of transformers, each in a process of its own.

    python tests/register [--only FAMILY ... | --sample COUNT] [--checks CHECK ...] [--again]

Results are kept in tests/register/results.json after each family, so that a run continues where the
last one ended; --again checks families anew. docs/site/reference.py makes the page from them.
With --sample, some families that passed are checked anew, always the same, and exit status 1 says
that one does not pass any more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from family_checks.limits import SECONDS, run_limited
from family_checks.results import (
    CHECKS,
    is_pending,
    read_results,
    sample,
    verdict,
    write_results,
)

HERE = Path(__file__).parent
_SLOWEST = ("qwen3_next",)  # come last
_DEVICES = 4


def main() -> None:
    """Parse arguments; check families."""
    parser = argparse.ArgumentParser(description="Make the register.")
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="families to check")
    parser.add_argument("--sample", type=int, metavar="COUNT", help="check a sample, keep nothing")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=CHECKS, metavar="CHECK")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    arguments = parser.parse_args()
    if arguments.sample:
        sys.exit(check_sample(arguments.sample, arguments.checks))
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
        report(family, found)


def check_sample(count: int, checks: Sequence[str]) -> int:
    """Check a sample again; return 1 if a check does not pass that passed before, else 0."""
    known, status = read_results(), 0
    for family in sample(count):
        found = check(family, checks)
        report(family, found)
        passed = (name for name in checks if known[family].get(name, {}).get("passed"))
        if not all(found.get(name, {}).get("passed") for name in passed):
            status = 1
    return status


def report(family: str, found: dict[str, Any]) -> None:
    """Print the verdicts of one family."""
    verdicts = " ".join(f"{name}:{verdict(one)}" for name, one in found.items())
    print(f"{family}: {verdicts}", flush=True)


def families() -> list[str]:
    """Return every model_type that AutoModelForCausalLM can build."""
    from transformers.models.auto import modeling_auto

    names = sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return sorted(names, key=lambda name: name in _SLOWEST)


def check(family: str, checks: Sequence[str]) -> dict[str, Any]:
    """Check one family in a process with limits of time and memory."""
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder) / "printed"
        process = _processes().Process(
            target=run_limited, args=(family, Path(folder), checks, printed)
        )
        process.start()
        process.join()
        text = printed.read_text() if printed.is_file() else ""
    fate = f"the process ended with status {process.exitcode}"
    if process.exitcode == -signal.SIGXCPU:
        fate = f"not finished after {SECONDS} s of processor"
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"check"')]
    found = {line.pop("check"): line for line in lines}
    missing = [name for name in checks if name not in found]
    if missing and found.get("trace", {"passed": True})["passed"]:
        found[missing[0]] = {"passed": False, "words": fate}
    return found


@cache
def _processes() -> Any:
    """Return a context whose processes are forks of one that has imported everything."""
    flags = f"--xla_force_host_platform_device_count={_DEVICES}"
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "TRANSFORMERS_OFFLINE": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (HERE, os.environ.get("PYTHONPATH", ""))))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["family"])
    return context


if __name__ == "__main__":
    main()
