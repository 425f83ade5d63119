"""Extraction of a script's graphs, by the recorder in an environment with torch-xla."""

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
from graphtrain.torch_xla.graphs import MANIFEST, Extraction, read_extraction

SUPPORTED_VERSION = "2.9.0"  # version of torch and torch-xla; the last release of torch-xla
_RECORDER = Path(__file__).with_name("recorder.py")
_STACK = "stack.txt"
_PROBE = (
    "from importlib.metadata import version as v;print(v('torch').partition('+')[0],v('torch-xla'))"
)
_INSTALL = f"""\
torch-xla needs a separate environment, because it requires an older PyTorch than graphtrain:
  python3.11 -m venv torch-xla
  torch-xla/bin/pip install torch=={SUPPORTED_VERSION} torch-xla=={SUPPORTED_VERSION} numpy
  graphtrain extract --python torch-xla/bin/python SCRIPT
graphtrain need not be installed there; only the file {_RECORDER} runs in it"""
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def extract(
    script: Path, arguments: Sequence[str], directory: Path, python: str, *, steps: int, reads: str
) -> Extraction:
    """Run a script for a number of steps, and write its graphs to a directory.

    Args:
        script: path of the script.
        arguments: of the script.
        directory: to write to.
        python: the interpreter that has torch-xla.
        steps: number of steps after which the script is stopped.
        reads: what happens if the script reads a device value: "refused" or "zeros".

    Raises:
        ExtractionError: the script failed or has no graphs, or torch-xla is not installed.
    """
    if not script.is_file():
        raise ExtractionError(f"the script {script} does not exist")
    check_versions(python)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MANIFEST).unlink(missing_ok=True)
    options = ["--steps", str(steps), "--reads", reads, str(directory), str(script), *arguments]
    status = _run([python, "-u", str(_RECORDER), *options])
    if not (directory / MANIFEST).exists():
        raise ExtractionError(_process_end(status, directory))
    extraction = read_extraction(directory)
    if extraction.error:
        raise ExtractionError(
            f"{script} stopped: {extraction.error}{_remaining_graphs_remark(extraction, directory)}"
        )
    if not extraction.graphs:
        raise ExtractionError(
            f"{script} ended without a graph: it computed nothing on an XLA device, or never ended "
            "a step (by torch_xla.sync, torch_xla.step, xm.mark_step, xm.optimizer_step with "
            "barrier=True, or a data loader of torch-xla)"
        )
    return extraction


def check_versions(python: str) -> None:
    """Check that an interpreter has the tested versions of torch and torch-xla.

    Raises:
        ExtractionError: it does not; says what to install.
    """
    try:
        probe = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True)
    except OSError as error:
        raise ExtractionError(f"--python {python}: {error.strerror}") from None
    if probe.returncode:
        raise ExtractionError(f"torch-xla is not installed for {python}\n{_INSTALL}")
    torch, torch_xla = probe.stdout.split()
    if (torch, torch_xla) != (SUPPORTED_VERSION, SUPPORTED_VERSION):
        raise ExtractionError(
            f"{python} has torch {torch} and torch-xla {torch_xla}; extraction patches "
            f"internals of torch-xla and needs {SUPPORTED_VERSION}\n{_INSTALL}"
        )


def _run(command: Sequence[str]) -> int:
    """Run a command, kill its process group at the end, and return its exit status.

    The script's output goes to stderr, as stdout is for the report.
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


def _remaining_graphs_remark(extraction: Extraction, directory: Path) -> str:
    """Return a remark on the graphs that were extracted before the script failed."""
    if not extraction.graphs:
        return ""
    return (
        f"\n{len(extraction.graphs)} graphs extracted until then are in {directory}; compile them "
        f"with: graphtrain extract --from {directory}"
    )


def _process_end(status: int, directory: Path) -> str:
    """Describe why there is no manifest: how the script's process ended, and where."""
    if status >= 0:
        return f"the script's process exited with status {status}; see its output above"
    name = signal.Signals(-status).name
    with suppress(OSError):
        for frame in _FRAME.finditer((directory / _STACK).read_text()):  # innermost first
            file = frame["file"]
            if "site-packages" not in file and file != str(_RECORDER):
                return f"torch-xla killed the script with {name} at {file}:{frame['line']}"
    return f"the script's process was killed by {name}"
