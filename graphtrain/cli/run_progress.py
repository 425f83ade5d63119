"""Progress of a run on the screen: one line per report, or a bar on a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import click

from graphtrain.run.callbacks import Callback, Metrics


@dataclass
class MeanSpeed:
    """Mean speed of the steps since the last report.

    The speed of a single step is not worth a report: metrics of two steps may arrive together, and
    then the first appears too slow and the second far too fast.
    """

    seconds: float = 0.0
    tokens: float = 0.0
    utilized_seconds: float = 0.0  # seconds that the steps would take at the peak FLOP/s

    def add(self, metrics: Metrics) -> None:
        """Add the metrics of a step."""
        seconds = metrics["step_seconds"]
        self.seconds += seconds
        self.tokens += metrics["tokens_per_second"] * seconds
        self.utilized_seconds += (metrics["mfu"] or 0.0) * seconds

    def take(self) -> tuple[float, float]:
        """Return the mean tokens per second and the mean MFU, and start anew."""
        seconds = self.seconds or 1.0
        means = self.tokens / seconds, self.utilized_seconds / seconds
        self.seconds = self.tokens = self.utilized_seconds = 0.0
        return means


@dataclass
class ProgressLines(Callback):
    """Callback of a run that prints one line per report.

    Args:
        steps: Last step of the run.
        every: Steps between two lines; tokens/s and MFU are means over these steps.
    """

    steps: int
    every: int
    speed: MeanSpeed = field(default_factory=MeanSpeed)

    def on_step(self, step: int, metrics: Metrics) -> None:
        self.speed.add(metrics)
        if step % self.every == 0:
            self._print(step, _format_metrics(metrics, self.speed))

    def on_evaluate(self, step: int, metrics: Metrics) -> None:
        self._print(step, _format_evaluation(metrics))

    def _print(self, step: int, text: str) -> None:
        click.echo(f"step {step}/{self.steps}  {text}", err=True)


@dataclass
class ProgressBar(Callback):
    """Callback of a run that moves a bar on a terminal."""

    every: int  # steps between two texts beside the bar
    display: Any
    row: Any
    speed: MeanSpeed = field(default_factory=MeanSpeed)

    def on_step(self, step: int, metrics: Metrics) -> None:
        self.speed.add(metrics)
        self.display.update(self.row, completed=step)
        if step % self.every == 0 or step == 1:
            self.display.update(self.row, description=_format_metrics(metrics, self.speed))

    def on_evaluate(self, step: int, metrics: Metrics) -> None:
        self.display.console.print(f"step {step}  {_format_evaluation(metrics)}")


@contextmanager
def progress_reporter(steps: int, every: int) -> Iterator[ProgressLines | ProgressBar]:
    """Yield a callback that shows progress: live on a terminal, elsewhere one line per report.

    Args:
        steps: Last step of the run.
        every: Steps between two reports.
    """
    if not sys.stderr.isatty():
        yield ProgressLines(steps, every)
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


def _format_evaluation(metrics: Metrics) -> str:
    return f"validation loss {metrics['validation_loss']:.4f}"


def _format_metrics(metrics: Metrics, speed: MeanSpeed) -> str:
    tokens_per_second, mfu = speed.take()
    fields = [
        f"loss {metrics['loss']:.4f}",
        f"grad norm {metrics['grad_norm']:.3f}",
        f"lr {metrics['learning_rate']:.2e}",
        f"{tokens_per_second:,.0f} tokens/s",
    ]
    if "accuracy" in metrics:
        fields.insert(1, f"margin {metrics['margin']:.3f}  accuracy {metrics['accuracy']:.0%}")
    if metrics["mfu"] is not None:
        fields.append(f"mfu {mfu:.1%}")
    return "  ".join(fields)
