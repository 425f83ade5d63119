"""The metric `code_eval`: the share of programs of a model that pass their tests, contained.

Each program runs in a process of its own, without network, new processes and files, and with limits
of memory and time. Its tests run in another one, which calls the program's functions through a
pipe: the program has neither the tests nor what they expect nor the result.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.errors import GraphtrainError
from graphtrain.run.evaluation.contained.confinement import SYSTEM_CALLS
from graphtrain.run.evaluation.contained.values import send

_CPU_SECONDS = 3  # as the timeout of the metric of Hugging Face
_OWN_SECONDS = 4.0  # from the start, without the time that it waited for a processor
_WALL_SECONDS = 30.0  # where Linux does not say how long that was
_WATCH_SECONDS = 0.2  # between two looks at a program
_MEMORY_BYTES = 1 << 30
_MAX_OUTPUT = 1 << 16  # bytes of a report
_PROCESSES = 4  # programs at the same time
_prompts: ContextVar[Mapping[str, str] | None] = ContextVar("prompts", default=None)
_reports: ContextVar[dict[tuple[str, str], str] | None] = ContextVar("reports", default=None)


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
            (task, index, program, test)
            for task, (test, candidates) in enumerate(zip(references, predictions, strict=True))
            for index, program in enumerate(candidates)
        ]
        prompts = _prompts.get() or {}

        def run(given: tuple[int, int, str, str]) -> str:
            _, _, program, test = given
            prompt = prompts.get(test, "")
            return run_program(program, test, prompt if program.startswith(prompt) else "")

        with ThreadPoolExecutor(_PROCESSES) as pool:
            reports = list(pool.map(run, programs))
        if (kept := _reports.get()) is not None:
            kept |= {(one[3], one[2]): said for one, said in zip(programs, reports, strict=True)}
        results: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        for (task, index, _, _), report in zip(programs, reports, strict=True):
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


@contextmanager
def prompts_of_tests(prompts: Mapping[str, str]) -> Iterator[None]:
    """Let programs in the block that continue a prompt be judged with the prompt's own functions.

    Args:
        prompts: Prompt of each test.
    """
    token = _prompts.set(prompts)
    try:
        yield
    finally:
        _prompts.reset(token)


@contextmanager
def reports_of_programs() -> Iterator[dict[tuple[str, str], str]]:
    """Yield a table that is filled in the block: what `run_program` says of each test and program.

    lm-eval keeps the metric alone.
    """
    reports: dict[tuple[str, str], str] = {}
    token = _reports.set(reports)
    try:
        yield reports
    finally:
        _reports.reset(token)


def check_available() -> None:
    """Check that this machine can contain programs.

    Raises:
        GraphtrainError: it is not Linux, or not of a known processor.
    """
    if sys.platform != "linux" or platform.machine() not in SYSTEM_CALLS:
        raise GraphtrainError(
            "--allow-code needs Linux on x86_64 or aarch64, whose system calls it filters; this is "
            f"{sys.platform} on {platform.machine()}"
        )
    if (report := run_program("")) != "passed":
        raise GraphtrainError(
            f"--allow-code: programs cannot be contained on this machine ({report})"
        )


def run_program(program: str, test: str = "", prompt: str = "") -> str:
    """Run a program of Python, and its tests in another process; return "passed", or why it failed.

    Args:
        program: What the model wrote, after the prompt if it continues one.
        test: Code that calls functions of the program, and raises if they are wrong.
        prompt: Beginning of the program that is the task's own, with helper functions of the tests.
    """
    limits = {"cpu_seconds": _CPU_SECONDS, "memory": _MEMORY_BYTES}
    answer_in, judge_out = os.pipe()
    judge_in, answer_out = os.pipe()
    with tempfile.TemporaryDirectory(prefix="graphtrain-code-") as folder:
        answer = _start("answer", folder, answer_in, answer_out, limits | {"program": program})
        given = limits | {"test": test, "prompt": prompt}
        judge = _start("judge", folder, judge_out, judge_in, given)
        with answer, judge, _watched(answer, judge):
            assert judge.stdout is not None
            report = judge.stdout.read(_MAX_OUTPUT).decode(errors="replace")
    return report or "timed out, or ended without a report"


def _start(
    role: str, folder: str, calls: int, replies: int, given: dict[str, Any]
) -> subprocess.Popen[bytes]:
    """Start the process of an answer or of its judge, and close the ends of pipes that it has."""
    begin = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
        f"from contained import {role}; del sys.path[0]; {role}.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", begin, str(calls), str(replies)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if role == "judge" else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={"PATH": os.defpath},
        pass_fds=(calls, replies),
        start_new_session=True,
    )
    os.close(calls)
    os.close(replies)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        send(process.stdin.fileno(), given)
    process.stdin.close()
    return process


@contextmanager
def _watched(*processes: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill processes that take too long in the block, and all of them at its end."""
    ended = threading.Event()
    threading.Thread(target=_watch, args=(processes, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        for process in processes:
            process.kill()


def _watch(processes: Sequence[subprocess.Popen[bytes]], ended: threading.Event) -> None:
    """Kill a program that takes too long, as one that sleeps does, until it has ended.

    One of the processes waits for the other, so that what either waits for a processor is not
    counted.
    """
    began, waited = time.monotonic(), None
    while not ended.wait(_WATCH_SECONDS):
        with contextlib.suppress(OSError, ValueError, IndexError):
            waited = sum(map(_seconds_of_waiting, processes))
        seconds = time.monotonic() - began
        own = 0.0 if waited is None else seconds - waited
        if seconds > _WALL_SECONDS or own > _OWN_SECONDS:
            for process in processes:
                process.kill()
            return


def _seconds_of_waiting(process: subprocess.Popen[bytes]) -> float:
    """Return how long a process has waited for a processor."""
    # Nanoseconds on a processor, and those of waiting for one.
    schedule = Path(f"/proc/{process.pid}/schedstat").read_text()
    return int(schedule.split()[1]) / 1e9


def _pass_at(totals: np.ndarray, correct: np.ndarray, count: int) -> np.ndarray:
    """Return the unbiased estimate of pass@k of each task (Chen et al., 2021)."""

    def estimate(total: int, passed: int) -> float:
        if total - passed < count:
            return 1.0
        return float(1 - np.prod(1 - count / np.arange(total - passed + 1, total + 1)))

    return np.array([estimate(*pair) for pair in zip(totals, correct, strict=True)])
