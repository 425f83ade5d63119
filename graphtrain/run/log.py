"""run.log: what a run reports, with the time, for those who were not there."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from graphtrain.run.callbacks import Callback
from graphtrain.run.events import Metrics, RunStart
from graphtrain.run.report_lines import MeanSpeed, evaluation_line, opening_lines, step_line

NAME = "run.log"


class RunLog(Callback):
    """Callback that appends to run.log in the directory of a run.

    What is noted before the run has taken its first step waits in memory, because the run may still
    be refused. A log that cannot be written ends no run.

    Args:
        directory: Directory of the run.
        steps: Last step of the run.
        every: Steps between two lines.
    """

    def __init__(self, directory: Path, steps: int, every: int) -> None:
        self._path, self._steps, self._every = directory / NAME, steps, every
        self._speed, self._waiting = MeanSpeed(), []
        self._file: IO[str] | None = None

    def note(self, text: str) -> None:
        """Append lines with the time."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        self._waiting += [f"{now}  {line}\n" for line in text.splitlines()]
        if self._file is not None:
            with suppress(OSError):
                self._file.writelines(self._waiting)
                self._file.flush()
            self._waiting.clear()

    def on_run_start(self, start: RunStart) -> None:
        with suppress(OSError):
            self._file = self._path.open("a", encoding="utf-8", errors="backslashreplace")
        self.note("\n".join(opening_lines(start)))

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._speed.add(metrics)
        if step % self._every == 0:
            self.note(f"step {step}/{self._steps}  {step_line(metrics, self._speed)}")

    def on_evaluate(self, step: int, metrics: Metrics) -> None:
        self.note(f"step {step}/{self._steps}  {evaluation_line(metrics)}")

    def on_checkpoint(self, step: int, path: Path) -> None:
        self.note(f"saved {path}")

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note the warnings and the error of the block; close the file at its end."""
        show = warnings.showwarning

        def note_and_show(message, *details, **more) -> None:
            self.note(f"warning: {message}")
            show(message, *details, **more)

        warnings.showwarning = note_and_show
        try:
            yield
        except Exception as error:
            self.note(f"error: {error}")
            raise
        finally:
            warnings.showwarning = show
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()
