"""Uploads of the files of a run while it trains (`run.upload`), by a process beside it."""

from __future__ import annotations

import queue
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from graphtrain.checkpoints.file_copies_process import FINISH, MODULE, FileCopiesJob
from graphtrain.checkpoints.side_process import read_events, start_process
from graphtrain.config.schema import Run
from graphtrain.run.callbacks import Callback
from graphtrain.run.events import Metrics, RunStart


class FileUploads(Callback):
    """Callback on rank 0 that has a process upload files; none of its failures ends the run.

    Args:
        job: The run, and the store.
        timeout: Seconds that the end of the run waits for the last upload.
        note: Called with lines for the log of the run.
    """

    def __init__(self, job: FileCopiesJob, timeout: float, note: Callable[[str], None]) -> None:
        self._job, self._timeout, self._note = job, timeout, note
        self._process: subprocess.Popen[str] | None = None
        self._events: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._failure: str | None = None  # of the last upload

    def on_run_start(self, start: RunStart) -> None:
        try:
            self._process = start_process(MODULE, self._job)
        except OSError as error:
            self._warn(f"no process starts: {error}")
            return
        self._reader = threading.Thread(
            target=self._read, args=(self._process,), name="file uploads", daemon=True
        )
        self._reader.start()

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._report()

    def close(self) -> None:
        """Wait for the last upload, for a limited time."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with suppress(OSError):  # the process has ended, as its exit status says
            process.stdin.write(FINISH)
            process.stdin.flush()
        try:
            status = process.wait(self._timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            reason = f"it took more than {self._timeout:g} s"
        else:
            reason = f"the process ended with status {status}" if status else None
        with suppress(OSError):
            process.stdin.close()
        self._reader.join()
        if reason is not None:
            self._warn(f"{self._last_failure() or reason}; the next start of the run uploads them")

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for event in read_events(lines):
                self._events.put(event)

    def _report(self) -> None:
        """Warn when uploads begin to fail, and note when they succeed again."""
        before = self._failure
        failure = self._last_failure()
        if failure is not None and before is None:
            self._warn(f"{failure}; it is tried again every {self._job.every_seconds:g} s")
        elif failure is None and before is not None:
            self._note(f"uploaded the files of the run to {self._job.url}")

    def _last_failure(self) -> str | None:
        """Return why the last upload failed; None if it succeeded, or there was none."""
        with suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                self._failure = event["reason"] if event["event"] == "failed" else None
        return self._failure

    def _warn(self, reason: str) -> None:
        warnings.warn(
            f"run.upload: files of the run are not all in {self._job.url}: {reason}", stacklevel=1
        )


@contextmanager
def uploading_files(run: Run, note: Callable[[str], None]) -> Iterator[list[FileUploads]]:
    """Yield a callback for run.upload, if it is set, and wait for its last upload after the block.

    Args:
        run: Settings of the run.
        note: Called with lines for the log of the run.
    """
    if run.upload is None or run.upload_place is None:
        yield []
        return
    url, endpoint = run.upload_place
    job = FileCopiesJob(run.directory, url, endpoint, run.upload.every_seconds)
    uploads = FileUploads(job, run.upload.timeout, note)
    try:
        yield [uploads]
    finally:
        uploads.close()
