"""A process for one family, with limits of time and memory; imports the checks only there."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from pathlib import Path

SECONDS, _BYTES = 600, 12 << 30  # of processor, so that a busy machine judges alike


def run_limited(family: str, folder: Path, checks: Sequence[str], printed: Path) -> None:
    """Run checks in this process, whose limits are set; print into a file."""
    resource.setrlimit(resource.RLIMIT_DATA, (_BYTES, _BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 10))
    from family import main

    with printed.open("w") as sys.stdout:
        main(family, folder, checks)
