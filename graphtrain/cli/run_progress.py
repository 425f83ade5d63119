"""Progress of a run on the screen: one line per report, or a bar on a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphtrain.cli.terminal import printable, say
from graphtrain.run.callbacks import Callback
from graphtrain.run.events import Metrics, RunStart
from graphtrain.run.report_lines import MeanSpeed, evaluation_line, opening_lines, step_line


@dataclass
class ProgressLines(Callback):
    """Callback of a run that prints one line per report.

    Args:
        steps: Last step of the run.
        every: Steps between two lines; tokens/s and MFU are means over these steps.
    """

    steps: int
    every: int
    verbose: bool = False  # also name checkpoints
    speed: MeanSpeed = field(default_factory=MeanSpeed)

    def observe(self, label: str, stage: str) -> None:
        """Report the stage of a graph that is compiled before the run."""
        say(f"{label}: {stage}")

    def on_run_start(self, start: RunStart) -> None:
        say("\n".join(opening_lines(start)))

    def on_step(self, step: int, metrics: Metrics) -> None:
        self.speed.add(metrics)
        if step % self.every == 0:
            self._print(step, step_line(metrics, self.speed))

    def on_evaluate(self, step: int, metrics: Metrics) -> None:
        self._print(step, evaluation_line(metrics))

    def on_checkpoint(self, step: int, path: Path) -> None:
        if self.verbose:
            self._print(step, f"saved {path}")

    def _print(self, step: int, text: str) -> None:
        say(f"step {step}/{self.steps}  {text}")


@dataclass
class ProgressBar(Callback):
    """Callback of a run that moves a bar on a terminal."""

    every: int  # steps between two texts beside the bar
    display: Any
    row: Any
    speed: MeanSpeed = field(default_factory=MeanSpeed)

    def observe(self, label: str, stage: str) -> None:
        """Show the stage of a graph that is compiled before the run."""
        self.display.update(self.row, description=f"{label}: {stage}")

    def on_run_start(self, start: RunStart) -> None:
        for line in opening_lines(start):
            self.display.console.print(printable(line), markup=False, highlight=False)

    def on_step(self, step: int, metrics: Metrics) -> None:
        self.speed.add(metrics)
        self.display.update(self.row, completed=step)
        if step % self.every == 0 or step == 1:
            self.display.update(self.row, description=step_line(metrics, self.speed))

    def on_evaluate(self, step: int, metrics: Metrics) -> None:
        self.display.console.print(f"step {step}  {evaluation_line(metrics)}")


@contextmanager
def progress_reporter(
    steps: int, every: int, *, verbose: bool = False
) -> Iterator[ProgressLines | ProgressBar]:
    """Yield a callback that shows progress: live on a terminal, elsewhere one line per report.

    Args:
        steps: Last step of the run.
        every: Steps between two reports.
        verbose: Print a line for every step and every checkpoint, on a terminal too.
    """
    if verbose or not sys.stderr.isatty():
        yield ProgressLines(steps, 1 if verbose else every, verbose)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as display:
        yield ProgressBar(every, display, display.add_task("starting", total=steps))
