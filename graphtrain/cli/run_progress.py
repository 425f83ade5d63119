"""Progress of a run on the screen: one line per report, or a bar on a terminal."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click

Record = Mapping[str, Any]  # as written to metrics.jsonl


@dataclass
class MeanSpeed:
    """Mean speed of the steps since the last report.

    The speed of a single step is not worth a report: metrics of two steps may arrive together, and
    then the first appears too slow and the second far too fast.
    """

    seconds: float = 0.0
    tokens: float = 0.0
    utilized_seconds: float = 0.0  # seconds that the steps would take at the peak FLOP/s

    def add(self, record: Record) -> None:
        """Add the record of a step."""
        seconds = record["step_seconds"]
        self.seconds += seconds
        self.tokens += record["tokens_per_second"] * seconds
        self.utilized_seconds += (record["mfu"] or 0.0) * seconds

    def take(self) -> tuple[float, float]:
        """Return the mean tokens per second and the mean MFU, and start anew."""
        seconds = self.seconds or 1.0
        means = self.tokens / seconds, self.utilized_seconds / seconds
        self.seconds = self.tokens = self.utilized_seconds = 0.0
        return means


@contextmanager
def progress_reporter(steps: int, every: int) -> Iterator[Callable[[Record], None]]:
    """Yield a function that shows progress: live on a terminal, elsewhere one line per report.

    Args:
        steps: Last step of the run.
        every: Steps between two lines; tokens/s and MFU are means over these steps.
    """
    speed = MeanSpeed()
    if not sys.stderr.isatty():

        def report(record: Record) -> None:
            if "validation_loss" not in record:
                speed.add(record)
            if "validation_loss" in record or record["step"] % every == 0:
                click.echo(
                    f"step {record['step']}/{steps}  {_format_record(record, speed)}", err=True
                )

        yield report
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
        row = display.add_task("starting", total=steps)

        def show(record: Record) -> None:
            if "validation_loss" in record:
                line = _format_record(record, speed)
                display.console.print(f"step {record['step']}  {line}")
                return
            speed.add(record)
            display.update(row, completed=record["step"])
            if record["step"] % every == 0 or record["step"] == 1:
                display.update(row, description=_format_record(record, speed))

        yield show


def _format_record(record: Record, speed: MeanSpeed) -> str:
    if "validation_loss" in record:
        return f"validation loss {record['validation_loss']:.4f}"
    tokens_per_second, mfu = speed.take()
    fields = [
        f"loss {record['loss']:.4f}",
        f"grad norm {record['grad_norm']:.3f}",
        f"lr {record['learning_rate']:.2e}",
        f"{tokens_per_second:,.0f} tokens/s",
    ]
    if "accuracy" in record:
        fields.insert(1, f"margin {record['margin']:.3f}  accuracy {record['accuracy']:.0%}")
    if record["mfu"] is not None:
        fields.append(f"mfu {mfu:.1%}")
    return "  ".join(fields)
