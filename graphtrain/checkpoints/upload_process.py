"""Process that uploads the checkpoints of a run while it trains: `python -m` this module.

It is a process of its own, so that a store that hangs, or an upload that is killed, never holds up
the run. It reads one JSON object from a line of standard input for each step to upload, and writes
one for each event. When standard input ends without `{"finish": true}`, the run was killed, and the
process ends at once: an upload without its manifest does not exist.

Of several steps that wait, only the newest is uploaded. A failed upload is repeated until it
succeeds or a newer step waits.

Where the hosts of a run share no disk, each has such a process, which uploads the parts on its own
disk. That of rank 0 waits for the parts of the others, and then writes the manifest.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphtrain.cache.store_errors import UnusableObject
from graphtrain.checkpoints.listing import list_remote, superfluous
from graphtrain.checkpoints.manifest import DamagedCheckpoint
from graphtrain.checkpoints.remote import RemoteCheckpoints
from graphtrain.checkpoints.remote_manifest import DamagedRemoteCheckpoint, RemoteManifest
from graphtrain.checkpoints.remote_parts import (
    PartsUpload,
    RefusedPart,
    UploadedParts,
    refuse_parts,
    upload_parts,
)
from graphtrain.checkpoints.same_run import OtherRun, check_store
from graphtrain.checkpoints.side_process import read_job, report
from graphtrain.checkpoints.steps import Retention
from graphtrain.errors import CacheError
from graphtrain.files import validate
from sharding_rules.errors import UserError

MODULE = __name__
_RETRY_SECONDS = 30.0  # for which a request is repeated, before the upload begins again
_PAUSE_SECONDS = 5.0  # before a failed upload begins again
_POLL_SECONDS = 1.0  # between looks for the parts of other hosts


@dataclass(frozen=True)
class UploadJob:
    """Run whose checkpoints the process uploads, and the store for them."""

    run_directory: str
    url: str
    endpoint: str | None
    retention: Retention


@dataclass(frozen=True)
class UploadRequest:
    """A step to upload: whole, from the directory of the run, or the parts on this host."""

    step: int
    parts: PartsUpload | None = None


class _Queue:
    """The step that waits to be uploaded: the newest of those that were asked for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: UploadRequest | None = None
        self._finishing = False

    def put(self, request: UploadRequest) -> None:
        with self._changed:
            if self._waiting is not None:
                _report("superseded", self._waiting.step)
            self._waiting = request
            self._changed.notify_all()

    def finish(self) -> None:
        with self._changed:
            self._finishing = True
            self._changed.notify_all()

    def take(self) -> UploadRequest | None:
        """Return the next step, as soon as there is one; None when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._finishing)
            request, self._waiting = self._waiting, None
            return request

    def wait_for_newer(self, seconds: float) -> bool:
        """Wait some seconds; return whether a newer step waits."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is not None, seconds)


def _report(event: str, step: int, **facts: Any) -> None:
    report(event=event, step=step, **facts)


def _upload_all(job: UploadJob, queue: _Queue) -> None:
    while (request := queue.take()) is not None:
        while not _upload(job, request, queue):
            if queue.wait_for_newer(_PAUSE_SECONDS):
                _report("superseded", request.step)
                break
    os._exit(0)


def _upload(job: UploadJob, request: UploadRequest, queue: _Queue) -> bool:
    """Upload one step; return False if it failed and is worth another attempt."""
    step, started = request.step, time.monotonic()
    try:
        remote = RemoteCheckpoints(job.url, job.endpoint, retry_seconds=_RETRY_SECONDS, create=True)
        if _is_present(remote, job, request):
            _report("present", step)
            return True
        check_store(remote, _directory(job, request), step)
        replaces = step in remote.steps()  # of the same run, which was trained again from before
        if request.parts is None:
            manifest = remote.upload(Path(job.run_directory), step)
        elif (manifest := _upload_parts(remote, job, request, request.parts, queue)) is None:
            return True
        seconds = time.monotonic() - started
        _report("uploaded", step, bytes=manifest.nbytes, seconds=seconds, replaces=replaces)
    except RefusedPart as error:  # of another host, which has recorded it
        _report("refused", step, reason=str(error))
        return True
    except (DamagedCheckpoint, DamagedRemoteCheckpoint, OtherRun, UnusableObject) as error:
        _report("refused", step, reason=str(error))
        _tell_rank_zero(job, request, str(error))
        return True
    except (UserError, OSError) as error:
        _report("failed", step, reason=str(error))
        return False
    _remove_superfluous(remote, job.retention, step)
    return True


def _tell_rank_zero(job: UploadJob, request: UploadRequest, reason: str) -> None:
    """Record that the parts of this host never come; without it, rank 0 waits until its limit."""
    if request.parts is None or request.parts.is_last:
        return
    with suppress(CacheError):
        remote = RemoteCheckpoints(job.url, job.endpoint, retry_seconds=_RETRY_SECONDS)
        refuse_parts(remote, request.parts, reason)


def _upload_parts(
    remote: RemoteCheckpoints,
    job: UploadJob,
    request: UploadRequest,
    parts: PartsUpload,
    queue: _Queue,
) -> RemoteManifest | None:
    """Upload the parts on this host; on rank 0, wait for the others and write the manifest.

    Return None where another host does that, or a newer step is to be uploaded instead.
    """
    upload_parts(remote, parts)
    if not parts.is_last:
        _report("part uploaded", request.step)
        return None
    uploaded = UploadedParts(remote, request.step, parts)
    if not _wait_for_parts(uploaded, request.step, queue):
        return None
    manifest = uploaded.finish(Path(job.run_directory))
    try:
        uploaded.delete_records()
    except CacheError as error:
        _report("not deleted", request.step, reason=str(error))
    return manifest


def _wait_for_parts(uploaded: UploadedParts, step: int, queue: _Queue) -> bool:
    """Wait for the parts of all hosts; return False if a newer step waits, and they are not there.

    A newer step is asked for while this process waits only if a part never comes, or all have come.
    """
    if uploaded.are_complete():
        return True
    _report("waiting", step)
    has_newer = False
    while not has_newer:
        has_newer = queue.wait_for_newer(_POLL_SECONDS)
        if uploaded.are_complete():
            return True
    _report("incomplete", step)
    return False


def _is_present(remote: RemoteCheckpoints, job: UploadJob, request: UploadRequest) -> bool:
    """Return whether the store has this checkpoint: by its manifest, or the upload of its parts."""
    if request.parts is None:
        return remote.has(Path(job.run_directory), request.step)
    if request.step not in remote.steps():
        return False
    with suppress(DamagedRemoteCheckpoint):
        return remote.manifest(request.step).prefix == request.parts.prefix
    return False


def _directory(job: UploadJob, request: UploadRequest) -> Path:
    """Return the directory of the checkpoints of which one is uploaded."""
    if request.parts is None:
        return Path(job.run_directory) / "checkpoints"
    return Path(request.parts.sources[0].directory).parent


def _remove_superfluous(remote: RemoteCheckpoints, retention: Retention, step: int) -> None:
    """Delete what is not kept. A failure is left to the next upload."""
    try:
        for old in superfluous(list_remote(remote), retention):
            if old != step:
                remote.delete(old)
    except (UserError, OSError) as error:
        _report("not deleted", step, reason=str(error))


def _read_requests(queue: _Queue) -> None:
    for line in sys.stdin:
        request: Mapping[str, Any] = json.loads(line)
        if request.get("finish"):
            queue.finish()
            return
        queue.put(validate(UploadRequest, request))
    os._exit(1)  # the run was killed


def main() -> None:
    """Upload until the run has ended."""
    queue = _Queue()
    job = read_job(UploadJob)
    threading.Thread(target=_upload_all, args=(job, queue), daemon=True).start()
    _read_requests(queue)
    sys.stdin.read()  # until the run has ended, or is killed
    os._exit(1)


if __name__ == "__main__":
    main()
