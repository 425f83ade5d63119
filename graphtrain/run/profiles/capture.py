"""Capture of profiles while a run trains: XLA's profiler over some steps of this process."""

from __future__ import annotations

import shutil
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from graphtrain.run.profiles.files import FOLDER, ProfileFacts, write_facts
from lowering.trees import Tree
from lowering.xla import distributed

# Steps that a signal traces. SIGUSR1 is for the rank processes of Ascend, and common in Slurm.
_STEPS_ON_SIGNAL = 5
SIGNAL = signal.SIGUSR2
_HOST_LEVEL = 2  # with the operations of a CPU; Python's own functions are not traced
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")  # whose programs XLA's profiler sees


class Profiler:
    """Profiler of the steps that run.profile names, and of those after a signal.

    Nothing is imported before the first traced step. A profile that cannot be written ends no run:
    it is a warning.
    """

    def __init__(
        self, directory: Path, steps: str | None, platform: str, last_step: int | None = None
    ) -> None:
        """Prepare to trace; warn of steps that the run does not reach.

        Args:
            directory: Directory of the run.
            steps: Value of run.profile.
            platform: Platform of the target.
            last_step: Last step of the run; None: not known.
        """
        self._directory, self._platform = directory, platform
        self._planned = None if steps is None else tuple(map(int, steps.split(":")))
        if self._planned and last_step is not None and self._planned[0] > last_step:
            warnings.warn(
                f'no profile: run.profile = "{steps}" begins after the last step, {last_step}',
                stacklevel=1,
            )
        self._first = self._last = 0  # of the profile that is being captured
        self._requested = False
        self._path: Path | None = None  # of the profile that is being captured
        self._began_at = 0.0

    @property
    def is_capturing(self) -> bool:
        """Return whether steps are traced now."""
        return self._path is not None

    def request(self) -> None:
        """Ask for a profile of the next steps."""
        self._requested = True

    def is_due(self, step: int) -> bool:
        """Return whether a profile begins before, or ends before, a step. Cheap."""
        if self._planned is not None and step == self._planned[0]:
            return True
        return step > self._last if self._path is not None else self._requested

    def move(self, step: int, executable: Any, state: Tree) -> None:
        """End the profile that is being captured, or begin one, before a step.

        The caller has waited for the metrics of the steps before it.

        Args:
            step: Step that is about to start.
            executable: Program of the traced steps.
            state: State before the step, which is waited for.
        """
        self.end(executable, state, step - 1)
        first, last = self._planned or (0, _STEPS_ON_SIGNAL - 1)
        if step != first and not self._requested:
            return
        self._requested = False
        self._first, self._last = step, step + last - first
        if self._platform not in PLATFORMS:
            warnings.warn(
                f"no profile: XLA's profiler does not see programs of {self._platform}; use the "
                "tools of its vendor",
                stacklevel=1,
            )
            return
        self._begin(state)

    def _begin(self, state: Tree) -> None:
        import jax

        path = self._directory / FOLDER / f"{self._first}-{self._last}"
        path = path / f"rank-{distributed.rank()}"
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level, options.host_tracer_level = 0, _HOST_LEVEL
        jax.block_until_ready(state)
        try:
            shutil.rmtree(path, ignore_errors=True)  # of a start that was killed in these steps
            path.mkdir(parents=True)
            jax.profiler.start_trace(path, profiler_options=options)
        except (OSError, RuntimeError) as error:
            warnings.warn(f"no profile of step {self._first}: {error}", stacklevel=1)
            return
        self._path, self._began_at = path, time.perf_counter()

    def annotate(self, step: int) -> AbstractContextManager[Any]:
        """Return a context that marks a step in the trace; nothing if there is none."""
        if self._path is None:
            return nullcontext()
        import jax

        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def end(self, executable: Any, state: Tree, last: int) -> None:
        """End the profile that is being captured, if there is one, and write it.

        Args:
            executable: Program of the traced steps.
            state: State after them, which is waited for.
            last: Last step, which may come before the one that was asked for.
        """
        if self._path is None:
            return
        import jax

        jax.block_until_ready(state)
        path, seconds = self._path, time.perf_counter() - self._began_at
        self._path = None
        record = executable.record
        try:
            jax.profiler.stop_trace()
            facts = ProfileFacts(
                first_step=self._first,
                last_step=last,
                seconds=round(seconds, 6),
                target=record["target"],
                mesh=record["mesh"],
                rank=distributed.rank(),
                peak_bytes=record["memory"]["peak"],
            )
            write_facts(path, facts, executable.compiled_text())
        except (OSError, RuntimeError) as error:
            warnings.warn(f"{path}: the profile is incomplete: {error}", stacklevel=1)

    def close(self) -> None:
        """Give up the profile that is being captured, when the run ends by an error."""
        if self._path is not None:
            import jax

            self._path = None
            jax.profiler.stop_trace()

    @contextmanager
    def on_signal(self) -> Iterator[None]:
        """Trace the next steps when SIGUSR2 comes, within the block."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(SIGNAL, lambda number, frame: self.request())
        try:
            yield
        finally:
            signal.signal(SIGNAL, previous)
            self.close()
