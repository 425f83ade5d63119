"""The metric `code_eval`: the share of programs of a model that pass their tests, contained.

Each program runs in a process of its own, which `code_runner` confines: no network, no new
processes, no file is written, and limits of memory and time.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.errors import GraphtrainError
from graphtrain.run.evaluation import code_runner

_CPU_SECONDS = 3  # as the timeout of the metric of Hugging Face
_OWN_SECONDS = 4.0  # from the start, without the time that it waited for a processor
_WALL_SECONDS = 30.0  # where Linux does not say how long that was
_WATCH_SECONDS = 0.2  # between two looks at a program
_MEMORY_BYTES = 1 << 30
_MAX_OUTPUT = 1 << 16  # bytes of a report
_PROCESSES = 4  # at the same time


class CodeEvaluation:
    """Metric with the interface of `evaluate.load("code_eval")`."""

    def compute(
        self,
        *,
        references: Sequence[str],
        predictions: Sequence[Sequence[str]],
        k: Sequence[int] = (1, 10, 100),
        **ignored: Any,
    ) -> tuple[dict[str, float], dict[int, list[tuple[int, dict[str, Any]]]]]:
        """Run each program with its test; return pass@k, and the result of each program."""
        programs = [
            (task, index, f"{program}\n{test}")
            for task, (test, candidates) in enumerate(zip(references, predictions, strict=True))
            for index, program in enumerate(candidates)
        ]
        with ThreadPoolExecutor(_PROCESSES) as pool:
            reports = list(pool.map(lambda one: run_program(one[2]), programs))
        results: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        for (task, index, _), report in zip(programs, reports, strict=True):
            passed = report == "passed"
            entry = {"task_id": task, "passed": passed, "result": report, "completion_id": index}
            results.setdefault(task, []).append((index, entry))
        totals = np.array([len(one) for one in results.values()])
        correct = np.array([sum(e["passed"] for _, e in one) for one in results.values()])
        return {
            f"pass@{count}": float(_pass_at(totals, correct, count).mean())
            for count in k
            if (totals >= count).all()
        }, results


def check_available() -> None:
    """Check that this machine can contain programs.

    Raises:
        GraphtrainError: it is not Linux, or not of a known processor.
    """
    if sys.platform != "linux" or platform.machine() not in code_runner.SYSTEM_CALLS:
        raise GraphtrainError(
            "--allow-code needs Linux on x86_64 or aarch64, whose system calls it filters; this is "
            f"{sys.platform} on {platform.machine()}"
        )
    if (report := run_program("")) != "passed":
        raise GraphtrainError(
            f"--allow-code: programs cannot be contained on this machine ({report})"
        )


def run_program(program: str) -> str:
    """Run a program of Python in a confined process; return "passed", or why it failed."""
    token = secrets.token_hex(16)  # passed on by the runner, after the program
    code = program.encode(errors="surrogatepass")
    given = f"{_CPU_SECONDS} {_MEMORY_BYTES} {len(code)}\n".encode() + code + token.encode()
    with tempfile.TemporaryDirectory(prefix="graphtrain-code-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(code_runner.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath},
            start_new_session=True,
        )
        ended = threading.Event()
        threading.Thread(target=_watch, args=(process, ended), daemon=True).start()
        assert process.stdin is not None and process.stdout is not None
        with process:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(given)
                process.stdin.close()
            output = process.stdout.read(_MAX_OUTPUT)
            ended.set()
            process.kill()  # what it still writes is not read
    last = output.decode(errors="replace").rpartition("\n")[2]
    if last == f"passed {token}":
        return "passed"
    reported = [line for line in output.decode(errors="replace").splitlines() if line]
    if reported and reported[-1].startswith("failed: "):
        return reported[-1][:500]
    return "timed out, or ended without a report"


def _watch(process: subprocess.Popen[bytes], ended: threading.Event) -> None:
    """Kill a program that takes too long, as one that sleeps does, until it has ended."""
    began, waited = time.monotonic(), None
    while not ended.wait(_WATCH_SECONDS):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # Nanoseconds on a processor, and those of waiting for one.
            schedule = Path(f"/proc/{process.pid}/schedstat").read_text()
            waited = int(schedule.split()[1]) / 1e9
        seconds = time.monotonic() - began
        own = 0.0 if waited is None else seconds - waited
        if seconds > _WALL_SECONDS or own > _OWN_SECONDS:
            process.kill()
            return


def _pass_at(totals: np.ndarray, correct: np.ndarray, count: int) -> np.ndarray:
    """Return the unbiased estimate of pass@k of each task (Chen et al., 2021)."""

    def estimate(total: int, passed: int) -> float:
        if total - passed < count:
            return 1.0
        return float(1 - np.prod(1 - count / np.arange(total - passed + 1, total + 1)))

    return np.array([estimate(*pair) for pair in zip(totals, correct, strict=True)])
