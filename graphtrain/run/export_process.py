"""Process that exports a run which is complete: `python -m` this module.

It is a process of its own, because the run holds the memory and the accelerators, and its other
ranks wait. It writes one JSON object for each thing to report, and ends when the run is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from graphtrain.checkpoints.file_copies import FileCopies
from graphtrain.checkpoints.manifest import NAME as MANIFEST
from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.files import content_digest
from graphtrain.run.earlier_runs import set_aside
from sharding_rules.documents import DocumentError, read_object
from sharding_rules.errors import UserError

MODULE = __name__
RECORD = "graphtrain.json"  # in the folder: from which checkpoint it is
_LAST = "config.json"  # without which no folder can be loaded


@dataclass(frozen=True)
class ExportJob:
    """Run whose checkpoint is exported, and the store for a copy of the folder."""

    run_directory: str
    step: int
    place: tuple[str, str | None] | None  # URL and endpoint

    def encode(self) -> str:
        """Return the job as the argument of the process."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> ExportJob:
        """Return the job that `encode` wrote."""
        fields = json.loads(text)
        return cls(**fields | {"place": fields["place"] and tuple(fields["place"])})


def export_directory(run_directory: Path, step: int) -> Path:
    """Return the Hugging Face folder of a step in the directory of a run."""
    return run_directory / f"hf-{step}"


def _report(kind: str, text: str) -> None:
    sys.stdout.write(json.dumps({kind: text}) + "\n")
    sys.stdout.flush()


def export(job: ExportJob) -> None:
    """Write the folder, if there is none of this checkpoint, and push it to the store.

    A push that fails is reported as a warning.

    Raises:
        UserError, OSError: the folder cannot be written.
    """
    run_directory = Path(job.run_directory)
    folder = export_directory(run_directory, job.step)
    manifest = run_directory / "checkpoints" / str(job.step) / MANIFEST
    with write_errors(run_directory):
        record = {"step": job.step, "checkpoint": content_digest(manifest)}
    if _record(folder) != record:
        if (folder / RECORD).exists():  # of the same step of a run that was trained again
            earlier = set_aside(run_directory, {folder.name})
            _report("note", f"moved {folder}, which is of another checkpoint, to {earlier}")
        _write(run_directory, folder, record)
        _report("note", f"exported the checkpoint of step {job.step} to {folder}")
    if job.place is not None:
        url, endpoint = job.place
        copies = FileCopies(run_directory, url, endpoint)
        try:
            if copies.upload_folder(folder.name, record=RECORD, last=_LAST):
                _report("note", f"pushed {folder} to {url}")
        except (UserError, OSError) as error:
            _report(
                "warning",
                f"{folder} is not in {url}: {error}; the next start of the run pushes it",
            )


def _record(folder: Path) -> dict[str, object] | None:
    with suppress(OSError, DocumentError):
        return dict(read_object(folder / RECORD))
    return None


def _write(run_directory: Path, folder: Path, record: dict[str, object]) -> None:
    from graphtrain.weights.convert import export_hugging_face

    export_hugging_face(
        run_directory,
        folder,
        lambda done, count: None,
        record["step"],  # pyright: ignore[reportArgumentType]
        more_files={RECORD: (json.dumps(record) + "\n").encode()},
    )


def _end_with_run() -> None:
    sys.stdin.read()
    os._exit(1)


def main() -> None:
    """Export; report an error that the user can correct."""
    # The run is asked to stop by signals to all its processes, and then ends this one.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_run, daemon=True).start()
    try:
        export(ExportJob.decode(sys.argv[1]))
    except (UserError, OSError) as error:
        _report("error", str(error))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
