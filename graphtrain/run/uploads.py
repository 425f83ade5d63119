"""Copies of the checkpoints of a run in an object store, uploaded while it trains."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from graphtrain.cache.sizes import format_size
from graphtrain.checkpoints.part_uploads import PartUploads, State
from graphtrain.checkpoints.side_process import read_events, start_process
from graphtrain.checkpoints.steps import Retention, saved_steps
from graphtrain.checkpoints.upload_process import MODULE, UploadJob, UploadRequest
from graphtrain.config.schema import CheckpointSettings
from graphtrain.run.callbacks import Callback
from graphtrain.run.events import Metrics, RunStart, RunSummary
from lowering.xla import distributed

# After an event of the process. A part that was refused never comes, for which rank 0 would wait.
_PROGRESS: Mapping[str, State] = {"waiting": "waiting", "failed": "failing", "refused": "failing"}


class Uploads(Callback):
    """Callback that has a process upload checkpoints; none of its failures ends the run.

    It is on rank 0; where the hosts share no disk, on every rank, each with the parts on its disk.

    Args:
        directory: Directory of the run.
        settings: Settings of its checkpoints, with `remote`.
        note: Called with lines for the log of the run.
        parts: Uploads of parts, where the hosts share no disk.
    """

    def __init__(
        self,
        directory: Path,
        settings: CheckpointSettings,
        note: Callable[[str], None],
        parts: PartUploads | None = None,
    ) -> None:
        assert settings.remote is not None
        self._settings, self._url, self._note = settings, settings.remote, note
        retention = Retention(settings.keep, settings.keep_best, settings.keep_every)
        self._checkpoints, self._parts = directory / "checkpoints", parts
        self._job = UploadJob(str(directory), self._url, settings.endpoint, retention)
        self._process: subprocess.Popen[str] | None = None
        self._events: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._in_use: dict[int, UploadRequest] = {}  # by step, asked for and not reported
        self._complete = 0  # newest step in the store, or the first step of this process
        self._start_step = 0
        self._asked = -1  # newest step that was asked for
        self._progress: State = "idle"  # of the newest step that was asked for
        self._left_out: int | None = None  # step that is uploaded if it is the last
        if parts is not None:
            parts.state = self._state

    def on_run_start(self, start: RunStart) -> None:
        self.begin(start.step)

    def begin(self, step: int) -> None:
        """Upload the checkpoint from which the run resumes, if the store lacks it.

        One on disks of the hosts (`run.checkpoints.local`) is not, if they share a disk.
        """
        whole = [] if self._parts else saved_steps(self._checkpoints)
        self._start_step = step
        self._complete = step if self._parts else max((s for s in whole if s <= step), default=0)
        if (request := self._request(step)) is not None:
            self._ask(request)

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._read_events()

    def on_checkpoint(self, step: int, path: Path) -> None:
        every = self._settings.remote_every
        if self._parts is None and every is not None and step % every:
            return
        if self._left_out is not None:
            self._warn_of_superseded(self._left_out)
            self._left_out = None
        if self._parts is not None and self._parts.is_left_out(step):
            self._left_out = step
        elif (request := self._request(step)) is not None:
            self._ask(request)

    def on_run_end(self, summary: RunSummary) -> None:
        """Upload the last checkpoint, whether it is due or not."""
        if summary.steps != self._asked and (request := self._request(summary.steps)) is not None:
            self._ask(request)

    def _request(self, step: int) -> UploadRequest | None:
        """Return what this host uploads of a step; None for nothing."""
        if self._parts is None:
            return UploadRequest(step) if step in saved_steps(self._checkpoints) else None
        parts = self._parts.upload(step)
        return UploadRequest(step, parts) if parts is not None and parts.sources else None

    def _state(self) -> State:
        """Return how far this host is, for all to agree which step is uploaded next."""
        self._read_events()
        if self._in_use and (self._process is None or self._process.poll() is not None):
            return "failing"  # it was killed
        return self._progress

    def steps_in_use(self) -> set[int]:
        """Return the steps whose local checkpoints must stay, because they are uploaded."""
        return set(self._in_use)  # in any thread

    def measure(self, step: int) -> dict[str, int]:
        """Return the metrics of a step: how far the store is behind."""
        return {"upload_lag_steps": step - self._complete}

    def wait(self, seconds: float) -> bool:
        """Wait until everything is uploaded; return whether it is, after so many seconds at most.

        Nothing can be asked for afterwards.
        """
        process = self._process
        if process is None:
            return True
        self._send({"finish": True})
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._read_events()
            return False
        self._reader.join()
        self._read_events()
        self._process = None
        self._warn_of_missing()
        return True

    def close(self) -> None:
        """End the process, whatever it does: an upload that is not complete does not exist."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            self._read_events()
            self._process = None
            self._warn_of_missing()

    def _warn_of_missing(self) -> None:
        if self._in_use:
            step, push = max(self._in_use), ""
            if self._parts is None:
                push = (
                    f", or: graphtrain checkpoints push {self._job.run_directory} {self._url} "
                    f"--step {step}"
                )
            _warn(
                f"the checkpoint of step {step} is not in {self._url}; the next start of the run "
                f"uploads it{push}"
            )

    def _ask(self, request: UploadRequest) -> None:
        self._asked, self._progress = request.step, "busy"
        self._in_use[request.step] = request
        requests = [request]
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
                requests = list(self._in_use.values())  # the process before it may have been killed
        except OSError as error:
            _warn(
                f"the checkpoint of step {request.step} is not uploaded: no process starts: {error}"
            )
            return
        for one in requests:
            self._send(asdict(one))

    def _start(self) -> None:
        self._process = start_process(MODULE, self._job)
        self._reader = threading.Thread(
            target=self._read, args=(self._process,), name="uploads", daemon=True
        )
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for event in read_events(process.stdout):
            self._events.put(event)

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended, and the next request starts it again
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def _read_events(self) -> None:
        with suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                self._handle(event["event"], event["step"], event)

    def _handle(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        where = f"the checkpoint of step {step}"
        if kind not in ("failed", "not deleted", "waiting"):
            self._in_use.pop(step, None)
        if step >= self._asked:
            self._progress = _PROGRESS.get(kind, "idle")
        if kind in ("uploaded", "present"):
            self._complete = max(self._complete, step)
        if kind == "uploaded":
            size, seconds = format_size(facts["bytes"]), facts["seconds"]
            instead = ", in place of an earlier one" if facts["replaces"] else ""
            self._note(f"uploaded {where} to {self._url}{instead}, {size} in {seconds:.1f} s")
        elif kind == "superseded":
            self._warn_of_superseded(step)
        elif kind == "incomplete":
            _warn(
                f"{where} is not uploaded to {self._url}: other hosts have not uploaded their "
                "parts, and a newer one waits; the warnings of the other hosts say why"
            )
        elif kind == "failed":
            _warn(f"{where} is not uploaded yet, and is tried again: {facts['reason']}")
        elif kind == "refused":
            _warn(f"{where} cannot be uploaded: {facts['reason']}")
        elif kind == "not deleted":
            _warn(f"older checkpoints in {self._url} were not deleted: {facts['reason']}")

    def _warn_of_superseded(self, step: int) -> None:
        is_first = self._parts is None or distributed.rank() == 0  # of all hosts that upload it
        if is_first and step != self._start_step:
            _warn(
                f"the checkpoint of step {step} is not uploaded to {self._url}: uploads take "
                "longer than the steps between them, and a newer one waits; raise "
                "run.checkpoints.remote_every"
            )


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=1)


def wait_for_uploads(
    uploads: Uploads | None, limit: float, agree: Callable[[str], str], poll_seconds: float = 10.0
) -> None:
    """Wait on every rank until the last checkpoint is in the store, or for `limit` seconds.

    Args:
        uploads: On rank 0, which knows; and on the others, if they have parts of it.
        limit: Seconds.
        agree: Called on all ranks with a text; returns that of rank 0.
        poll_seconds: Between two agreements: the other ranks must not wait long in one.
    """
    deadline = time.monotonic() + limit
    while True:
        left = deadline - time.monotonic()
        is_over = uploads is None or uploads.wait(max(0.0, min(poll_seconds, left))) or left <= 0
        if agree("over" if is_over else ""):
            return
