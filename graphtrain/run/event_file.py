"""TensorBoard events of a run, written by the thread that trains.

The writer of tensorboardX has a thread and a function at exit, which print a traceback when the
disk is full. Here a failure is an error of the call.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lowering.machine import startup

_FLUSH_SECONDS = 120  # between writes to the disk; the first event is written at once


class EventFile:
    """Event file in a directory, which TensorBoard shows as one run."""

    def __init__(self, directory: Path, first_step: int) -> None:
        """Create the file.

        Args:
            directory: for the event files of the run.
            first_step: TensorBoard ignores the events of earlier files from this step on.

        Raises:
            OSError: the file cannot be written.
        """
        # Without PyTorch, which tensorboardX would import (seconds, if installed) to draw models.
        self._tensorboard: Any = startup.import_without("tensorboardX", "torch")
        directory.mkdir(parents=True, exist_ok=True)
        self._file = self._tensorboard.event_file_writer.EventsWriter(str(directory / "events"))
        self._flushed_at = float("-inf")
        session = self._tensorboard.proto.event_pb2.SessionLog
        self._add(first_step, file_version="brain.Event:2")
        self._add(first_step, session_log=session(status=session.START))

    def write(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """Append metrics.

        Raises:
            OSError: the file cannot be written.
        """
        for name, value in metrics.items():
            if value is not None:
                self._add(step, summary=self._tensorboard.summary.scalar(name, value))
        if time.monotonic() - self._flushed_at > _FLUSH_SECONDS:
            self._file.flush()
            self._flushed_at = time.monotonic()

    def write_text(self, step: int, name: str, text: str) -> None:
        """Append a text in Markdown.

        Raises:
            OSError: the file cannot be written.
        """
        self._add(step, summary=self._tensorboard.summary.text(name, text))

    def close(self) -> None:
        """Write the last events; what cannot be written is lost."""
        with suppress(OSError):
            self._file.close()

    def _add(self, step: int, **content: Any) -> None:
        event = self._tensorboard.proto.event_pb2.Event
        self._file.write_event(event(wall_time=time.time(), step=step, **content))
