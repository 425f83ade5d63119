"""Processes beside a run, which upload or export for it: `python -m MODULE JOB`.

Each is told its job as JSON, its only argument, and writes one JSON object to a line of standard
output for each event. The end of standard input tells it that the run has ended, or was killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

from graphtrain.files import validate

T = TypeVar("T")


def start_process(
    module: str, job: Any, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start the process of a module.

    Args:
        module: Name of the module.
        job: A dataclass that `read_job` returns there.
        environment: Variables in addition to those of this process.

    Raises:
        OSError: no process starts.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(asdict(job))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )


def read_events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the events that a process reports; what a library prints is left out."""
    for line in lines:
        with suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict):
                yield event


def read_job(kind: type[T]) -> T:
    """Return the job of this process, which from here on ignores signals that ask it to stop.

    They are sent to all processes of a run, which then waits for this one, or ends it.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return validate(kind, json.loads(sys.argv[1]))


def report(**event: Any) -> None:
    """Report an event to the run, which may have been killed."""
    with suppress(OSError):
        # On a line of its own, also after what a library printed without an end of line.
        sys.stdout.write("\n" + json.dumps(event) + "\n")
        sys.stdout.flush()
