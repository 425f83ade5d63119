"""Process that exports a run which is complete: `python -m` this module.

It is a process of its own, because the run holds the memory and the accelerators, and its other
ranks wait. It writes one JSON object for each thing to report, and ends when the run is killed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from graphtrain.checkpoints.file_copies import FileCopies
from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.checkpoints.side_process import read_job, report
from graphtrain.models.optimizer_state import EMA
from graphtrain.run.earlier_runs import set_aside
from graphtrain.run.exported_checkpoint import ExportedCheckpoint, Place
from sharding_rules.documents import DocumentError, read_object
from sharding_rules.errors import UserError

MODULE = __name__
RECORD = "graphtrain.json"  # in the folder: from which checkpoint it is
# Files without which no folder can be loaded, by the kind of the export.
_LAST = {"hf": "config.json", "peft": "adapter_config.json"}


@dataclass(frozen=True)
class ExportJob:
    """Run whose checkpoint is exported, and the store for a copy of the folder."""

    run_directory: str
    step: int
    place: Place | None  # of the copy of the folder
    kind: Literal["hf", "peft"] = "hf"
    averaged: bool = False  # the moving average of the weights
    store: Place | None = None  # of the checkpoints, for a step that the directory does not have

    @property
    def folder(self) -> Path:
        """Return the folder in the directory of the run."""
        average = "averaged-" if self.averaged else ""
        return Path(self.run_directory) / f"{self.kind}-{average}{self.step}"

    @property
    def root(self) -> str:
        """Return the path in the state below which the exported arrays are."""
        return f"optimizer/{EMA}" if self.averaged else "parameters"


def export(job: ExportJob) -> None:
    """Write the folder, if there is none of this checkpoint, and push it to the store.

    A push that fails is reported as a warning.

    Raises:
        UserError, OSError: the folder cannot be written.
    """
    run_directory = Path(job.run_directory)
    folder = job.folder
    checkpoint = ExportedCheckpoint(run_directory, job.step, job.store, job.root)
    with write_errors(run_directory):
        record = {"step": job.step, "checkpoint": checkpoint.digest}
    if _record(folder) != record:
        if (folder / RECORD).exists():  # of the same step of a run that was trained again
            earlier = set_aside(run_directory, {folder.name})
            report(note=f"moved {folder}, which is of another checkpoint, to {earlier}")
        with checkpoint.directory(folder.with_name(f".{folder.name}.checkpoint")) as source:
            _write(job, source, {RECORD: (json.dumps(record) + "\n").encode()})
        report(note=f"exported the checkpoint of step {job.step} to {folder}")
    if job.place is not None:
        url, endpoint = job.place
        copies = FileCopies(run_directory, url, endpoint)
        try:
            if copies.upload_folder(folder.name, record=RECORD, last=_LAST[job.kind]):
                report(note=f"pushed {folder} to {url}")
        except (UserError, OSError) as error:
            reason = f"{folder} is not in {url}: {error}; the next start of the run pushes it"
            report(warning=reason)


def _record(folder: Path) -> dict[str, object] | None:
    with suppress(OSError, DocumentError):
        return dict(read_object(folder / RECORD))
    return None


def _write(job: ExportJob, source: Path, files: Mapping[str, bytes]) -> None:
    folder = job.folder
    if job.kind == "peft":
        from graphtrain.weights.peft_export import export_peft

        export_peft(source, folder, job.step, more_files=files)
        return
    from graphtrain.weights.hf_export import export_hugging_face

    export_hugging_face(
        source,
        folder,
        lambda done, count: None,
        job.step,
        averaged=job.averaged,
        more_files=files,
    )


def _end_with_run() -> None:
    sys.stdin.read()
    os._exit(1)


def main() -> None:
    """Export; report an error that the user can correct."""
    job = read_job(ExportJob)
    threading.Thread(target=_end_with_run, daemon=True).start()
    try:
        export(job)
    except (UserError, OSError) as error:
        report(error=str(error))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
