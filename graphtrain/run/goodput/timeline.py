"""Timeline of a process: how long it was in each activity, appended to goodput.jsonl by a thread.

The main thread only counts in memory. The thread writes what has passed since its last line, at
least every 0.1 s of a young process and 0.5 % of the age of an old one: a process that is killed
loses no more of its time than that, and a run of months writes some thousands of lines.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graphtrain.files import append_line
from graphtrain.run.goodput import activities

NAME = "goodput.jsonl"
_SHORTEST, _SHARE_OF_AGE = 0.1, 0.005  # between two lines: seconds, and share of the process's age
_CLOSE_SECONDS = 5.0  # for the last lines, on a file system that hangs


class Timeline:
    """Recorder of the activities of this process.

    Nothing is written before `open`, because the run may still be refused. A timeline that cannot
    be written ends no run: `close` warns of it.
    """

    def __init__(self, started_at: float | None = None) -> None:
        """Begin with the activity START.

        Args:
            started_at: Unix time at which the process started; None for now.
        """
        now = time.time()
        self._offset = now - time.monotonic()  # a clock that is set meanwhile changes nothing
        self._process = uuid.uuid4().hex[:12]
        self._started_at = min(now, started_at or now)
        self._since, self._activity = self._started_at, activities.START
        self._step = 0  # last step that is complete
        self._is_first = True  # no step of this process is complete
        self._counted: dict[str, Any] = {}  # of the current activity, since the last line
        self._lines: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._failure: OSError | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write_until_closed, daemon=True)
        facts = {"host": os.uname().nodename, "pid": os.getpid()}
        self._note("start", self._started_at, facts)

    def move(self, activity: str) -> None:
        """Begin another activity. Cheap; called in every step."""
        if activity == activities.STEP and self._is_first:
            activity = activities.FIRST_STEP
        if activity != self._activity:
            with self._lock:
                self._cut()
                self._activity = activity

    def begin(self, step: int, compile_seconds: Mapping[str, float], target: str) -> None:
        """Note the step from which this process trains, and what its programs took to compile."""
        self._step = step
        facts = {"step": step, "compile_seconds": dict(compile_seconds), "target": target}
        self._note("begin", self._now(), facts)

    def finish_step(self, step: int, late_data_seconds: float | None) -> None:
        """Count a step that is complete.

        Args:
            step: its number.
            late_data_seconds: how long the loop waited for its batch, if the step before it was
                complete by then; None if the batch came in time.
        """
        with self._lock:
            counted = self._counted
            counted["steps"] = counted.get("steps", 0) + 1
            if late_data_seconds is not None:
                counted["late"] = counted.get("late", 0) + 1
                counted["late_seconds"] = counted.get("late_seconds", 0.0) + late_data_seconds
            self._step, self._is_first = step, False
            if self._activity == activities.FIRST_STEP:
                self._cut()
                self._activity = activities.STEP

    def open(self, directory: Path) -> None:
        """Start to write to the directory of the run; does nothing if it has been called."""
        if self._path is None:
            self._path = directory / NAME
            self._thread.start()

    def end(self, outcome: str) -> None:
        """Note how the process ends, and write everything. Later calls do nothing."""
        if self._closed.is_set():
            return
        with self._lock:
            self._cut()
        self._note("end", self._now(), {"outcome": outcome[:500]})
        self._closed.set()
        if self._path is not None:
            self._thread.join(_CLOSE_SECONDS)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note at the end of the block an error, if it raises one; warn if nothing was written."""
        try:
            yield
        except BaseException as error:
            self.end(f"error: {error or type(error).__name__}".partition("\n")[0])
            raise
        finally:
            self.end("completed")
            if self._failure is not None:
                warnings.warn(
                    f"{self._path} is incomplete: it could not be written ({self._failure}); "
                    "graphtrain goodput counts the missing time as unrecorded",
                    stacklevel=1,
                )

    def _now(self) -> float:
        return self._offset + time.monotonic()

    def _cut(self) -> None:
        """Make a line of what has passed since the last one. The caller holds the lock."""
        now = self._now()
        line = {
            "process": self._process,
            "at": round(now, 4),
            "activity": self._activity,
            "seconds": round(now - self._since, 4),
            "step": self._step,
        }
        self._lines.append(line | self._counted)
        self._counted, self._since = {}, now

    def _note(self, event: str, at: float, facts: Mapping[str, Any]) -> None:
        line = {"process": self._process, "at": round(at, 4), "event": event, **facts}
        with self._lock:
            self._lines.append(line)

    def _write_until_closed(self) -> None:
        is_closed = False
        while not is_closed:
            is_closed = self._closed.wait(self._interval())
            with self._lock:
                if not is_closed and self._now() - self._since > self._interval() / 2:
                    self._cut()
                lines, self._lines = self._lines, []
            self._append(lines)

    def _interval(self) -> float:
        return max(_SHORTEST, _SHARE_OF_AGE * (self._now() - self._started_at))

    def _append(self, lines: list[dict[str, Any]]) -> None:
        assert self._path is not None
        if not lines or self._failure is not None:
            return
        text = "\n".join(json.dumps(line) for line in lines)
        try:
            append_line(self._path, text)
        except OSError as error:
            self._failure = error
