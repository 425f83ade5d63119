"""Runs a script under the recorder, in the environment of torch-xla."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from graphtrain.errors import ExtractionError
from graphtrain.torch_xla.graphs import MANIFEST, Extraction, read

TESTED = "2.9.0"  # of torch and torch-xla; there is no later torch-xla
_RECORDER = Path(__file__).with_name("recorder.py")
_STACK = "stack.txt"
_PROBE = (
    "from importlib.metadata import version as v;print(v('torch').partition('+')[0],v('torch-xla'))"
)
_INSTALL = f"""\
torch-xla needs an environment of its own, as its PyTorch is older than graphtrain's:
  python3.11 -m venv torch-xla
  torch-xla/bin/pip install torch=={TESTED} torch-xla=={TESTED} numpy
  graphtrain extract --python torch-xla/bin/python SCRIPT
graphtrain is not installed there: what runs in it is one file, {_RECORDER}"""
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def extract(
    script: Path, arguments: Sequence[str], directory: Path, python: str, *, steps: int, reads: str
) -> Extraction:
    """Run a script until it has taken some steps; its graphs are then in the directory.

    Args:
        python: the interpreter that has torch-xla.
        reads: of values that are not computed: "refused", or "zeros".

    Raises:
        ExtractionError: the script failed, or gave no graph, or torch-xla is not there.
    """
    if not script.is_file():
        raise ExtractionError(f"no script {script}")
    check_versions(python)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MANIFEST).unlink(missing_ok=True)
    options = ["--steps", str(steps), "--reads", reads, str(directory), str(script), *arguments]
    status = _run([python, "-u", str(_RECORDER), *options])
    if not (directory / MANIFEST).exists():
        raise ExtractionError(_died(status, directory))
    found = read(directory)
    if found.problem:
        raise ExtractionError(f"{script} stopped: {found.problem}{_left(found, directory)}")
    if not found.graphs:
        raise ExtractionError(
            f"{script} ended and gave no graph: it computed nothing on an XLA device, or never "
            "ended a step (torch_xla.sync, torch_xla.step, xm.mark_step, xm.optimizer_step with "
            "barrier=True, a loader of torch-xla)"
        )
    return found


def check_versions(python: str) -> None:
    """Refuse an interpreter without torch-xla, or with another than was tested.

    Raises:
        ExtractionError: with what to install.
    """
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True)
    except OSError as error:
        raise ExtractionError(f"--python {python}: {error.strerror}") from None
    if done.returncode:
        raise ExtractionError(f"torch-xla is not installed for {python}\n{_INSTALL}")
    torch, torch_xla = done.stdout.split()
    if (torch, torch_xla) != (TESTED, TESTED):
        raise ExtractionError(
            f"{python} has torch {torch} and torch-xla {torch_xla}; extraction replaces parts of "
            f"torch-xla {TESTED}\n{_INSTALL}"
        )


def _run(command: Sequence[str]) -> int:
    """Run to the end, and end what is left of it if this is interrupted; its exit status.

    What the script prints goes to standard error: standard output is for the report.
    """
    with tempfile.TemporaryDirectory(prefix="graphtrain-extract-") as scratch:
        process = subprocess.Popen(
            command,
            stdout=sys.stderr,
            start_new_session=True,
            env=os.environ | {"TMPDIR": scratch},
        )
        try:
            return process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _left(found: Extraction, directory: Path) -> str:
    if not found.graphs:
        return ""
    return (
        f"\n{len(found.graphs)} graphs from before are in {directory}: "
        f"graphtrain extract --from {directory} compiles them"
    )


def _died(status: int, directory: Path) -> str:
    """Why there is no manifest: torch-xla ended the process, or it never began."""
    if status >= 0:
        return f"the script's process ended with status {status}; its messages are above"
    name = signal.Signals(-status).name
    with suppress(OSError):
        for found in _FRAME.finditer((directory / _STACK).read_text()):  # innermost first
            file = found["file"]
            if "site-packages" not in file and file != str(_RECORDER):
                return f"torch-xla ended the script by {name} at {file}:{found['line']}"
    return f"the script's process was ended by {name}"
