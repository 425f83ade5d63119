"""Process that uploads the files of a run while it trains: `python -m` this module.

It is a process of its own, so that a store that hangs never holds up the run. It uploads what has
changed at each interval, and once more when it reads `finish` from standard input, or when that
ends because the run was killed: then for a limited time. It writes one JSON object for each event.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from graphtrain.checkpoints.file_copies import FileCopies
from graphtrain.checkpoints.side_process import read_job, report
from sharding_rules.errors import UserError

MODULE = __name__
FINISH = "finish\n"
_RETRY_SECONDS = 30.0  # for which a request is repeated
_PAUSE_SECONDS = 2.0  # between attempts of the last upload
_SECONDS_AFTER_RUN = 30.0  # for the last upload of a run that was killed
_PRIORITY = 10  # below that of the run, which may compute on the same cores


@dataclass(frozen=True)
class FileCopiesJob:
    """Run whose files the process uploads, and the store for them."""

    run_directory: str
    url: str
    endpoint: str | None
    every_seconds: float


def _upload_until(job: FileCopiesJob, ending: threading.Event) -> None:
    """Upload at each interval and, until it succeeds, at the end."""
    place = job.url, job.endpoint
    copies = FileCopies(Path(job.run_directory), *place, retry_seconds=_RETRY_SECONDS)
    while not ending.is_set():
        _upload(copies)
        ending.wait(job.every_seconds)
    while not _upload(copies):
        time.sleep(_PAUSE_SECONDS)
    os._exit(0)


def _upload(copies: FileCopies) -> bool:
    try:
        report(event="uploaded", bytes=copies.upload_changed())
    except (UserError, OSError) as error:
        report(event="failed", reason=str(error))
        return False
    return True


def main() -> None:
    """Upload until the run has ended."""
    job = read_job(FileCopiesJob)
    os.nice(_PRIORITY)
    ending = threading.Event()
    threading.Thread(target=_upload_until, args=(job, ending), daemon=True).start()
    sys.stdin.readline()  # FINISH, or nothing when the run has ended
    ending.set()
    sys.stdin.read()
    time.sleep(_SECONDS_AFTER_RUN)
    os._exit(1)


if __name__ == "__main__":
    main()
