"""Process that uploads the files of a run while it trains: `python -m` this module.

It is a process of its own, so that a store that hangs never holds up the run. It uploads what has
changed at each interval, and once more when it reads `finish` from standard input, or when that
ends because the run was killed: then for a limited time. It writes one JSON object for each event.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphtrain.checkpoints.file_copies import FileCopies
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

    def encode(self) -> str:
        """Return the job as the argument of the process."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> FileCopiesJob:
        """Return the job that `encode` wrote."""
        return cls(**json.loads(text))


def _report(event: str, **facts: Any) -> None:
    with suppress(OSError):  # the run was killed, and nobody reads
        sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
        sys.stdout.flush()


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
        _report("uploaded", bytes=copies.upload_changed())
    except (UserError, OSError) as error:
        _report("failed", reason=str(error))
        return False
    return True


def main() -> None:
    """Upload until the run has ended."""
    # The run is asked to stop by signals to all its processes, and then waits for this one.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_PRIORITY)
    ending = threading.Event()
    job = FileCopiesJob.decode(sys.argv[1])
    threading.Thread(target=_upload_until, args=(job, ending), daemon=True).start()
    sys.stdin.readline()  # FINISH, or nothing when the run has ended
    ending.set()
    sys.stdin.read()
    time.sleep(_SECONDS_AFTER_RUN)
    os._exit(1)


if __name__ == "__main__":
    main()
