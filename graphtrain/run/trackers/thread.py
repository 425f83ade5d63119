"""Thread that sends the metrics of a run to a tracker, so that no step waits for one.

A tracker that fails ends no run: it is reported once, and its metrics stay in metrics.jsonl.
"""

from __future__ import annotations

import importlib
import json
import queue
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from graphtrain.config.schema import Run
from graphtrain.errors import TrainingError
from graphtrain.files import atomic_write
from graphtrain.run.callbacks import Callback
from graphtrain.run.events import Metrics, RunStart, RunSummary
from sharding_rules.documents import DocumentError, read_object

FOLDER = "trackers"  # in the directory of a run
_CLOSE_SECONDS = 60.0  # for the last metrics, at the end of a run
_MAX_WAITING = 100_000  # records, for a service that does not answer

StepMetrics = tuple[int, Metrics]


class Tracker(Protocol):
    """Client of a service; used by one thread. Any exception ends its use."""

    def start(self, start: RunStart, identifier: str | None) -> str:
        """Begin to track, or resume; return an identifier by which a later start resumes.

        Args:
            start: the run.
            identifier: what an earlier start of this run returned; None for a new run.
        """
        ...

    def log(self, records: Sequence[StepMetrics]) -> None:
        """Send metrics by step. A step may come again, after a restart."""
        ...

    def end(self, completed: bool) -> None:
        """Send the rest, and note whether the run came to its last step."""
        ...


class TrackerThread(Callback):
    """Callback that hands metrics to a tracker on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: queue.SimpleQueue[StepMetrics | None] = queue.SimpleQueue()
        self._completed, self._dropped = False, 0
        self._failure: str | None = None
        self._is_reported = False
        self._thread: threading.Thread | None = None

    def on_run_start(self, start: RunStart) -> None:
        self._thread = threading.Thread(target=self._send, args=(start,), daemon=True)
        self._thread.start()

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._add(step, metrics)

    def on_evaluate(self, step: int, metrics: Metrics) -> None:
        self._add(step, metrics)

    def on_run_end(self, summary: RunSummary) -> None:
        self._completed = summary.stopped_by is None

    def close(self) -> None:
        """Wait until everything is sent, for a limited time."""
        if self._thread is None:
            return
        self._waiting.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            self._failure = f"it did not take the last metrics in {_CLOSE_SECONDS:.0f} s"
        if self._dropped and self._failure is None:
            self._failure = f"it was too slow, and {self._dropped} records were left out"
        self._report()

    def _add(self, step: int, metrics: Metrics) -> None:
        self._report()
        if self._failure is not None:
            return
        if self._waiting.qsize() >= _MAX_WAITING:
            self._dropped += 1
            return
        self._waiting.put((step, dict(metrics)))

    def _report(self) -> None:
        """Warn of a failure, once, on the thread of the run."""
        if self._failure is not None and not self._is_reported:
            self._is_reported = True
            warnings.warn(
                f"run.trackers: {self._name} stopped: {self._failure}; the run continues, and all "
                "metrics are in metrics.jsonl",
                stacklevel=1,
            )

    def _send(self, start: RunStart) -> None:
        try:
            tracker = open_tracker(self._name)
            _resume(tracker, start, start.directory / FOLDER / f"{self._name}.json")
            is_open = True
            while is_open:
                records = [self._waiting.get()]
                while not self._waiting.empty():
                    records.append(self._waiting.get())
                is_open = None not in records
                tracker.log([record for record in records if record is not None])
            tracker.end(self._completed)
        except Exception as error:
            first = str(error).strip().partition("\n")[0][:500]
            self._failure = f"{type(error).__name__}: {first}"


def _resume(tracker: Tracker, start: RunStart, path: Path) -> None:
    """Start a tracker, and keep its identifier in the directory of the run."""
    identifier = None
    if path.exists():
        try:
            identifier = read_object(path)["id"]
        except (OSError, DocumentError, KeyError) as error:
            raise TrainingError(f"{path} is damaged ({error}); remove it") from None
    path.parent.mkdir(exist_ok=True)
    identifier = tracker.start(start, identifier)
    with atomic_write(path) as file:
        file.write(json.dumps({"id": identifier}).encode())


def open_tracker(name: str) -> Tracker:
    """Return the tracker of a name in run.trackers; each is a module of this folder."""
    return importlib.import_module(f"graphtrain.run.trackers.{name}_tracker").make_tracker()


@contextmanager
def tracking(run: Run) -> Iterator[list[TrackerThread]]:
    """Yield a callback for each of run.trackers, and close them at the end of the block."""
    with ExitStack() as stack:
        threads = [TrackerThread(name) for name in run.trackers]
        for thread in threads:
            stack.callback(thread.close)
        yield threads
