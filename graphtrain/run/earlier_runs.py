"""Starting again in the directory of a run, without losing what is in it."""

import os
from collections.abc import Collection
from pathlib import Path

from graphtrain.checkpoints.file_copies import RECORD as UPLOAD_RECORD
from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.run.directory_lock import LEASE
from graphtrain.run.metrics import METRICS_NAME

_FOLDER = "earlier"


def set_aside(directory: Path, names: Collection[str] | None = None) -> Path | None:
    """Move files of the run in a directory to its folder earlier/N; return that folder.

    The caller has locked the directory. Returns None if there is nothing to move.

    Args:
        directory: Directory of the run.
        names: Names of the files and folders to move; None for all.

    Raises:
        TrainingError: a file cannot be moved.
    """
    kept_in_place = {_FOLDER, LEASE}
    with write_errors(directory):
        paths = [
            path
            for path in directory.iterdir()
            if path.name not in kept_in_place and (names is None or path.name in names)
        ]
        if not paths:
            return None
        number = 1
        while (destination := directory / _FOLDER / str(number)).exists():
            number += 1
        destination.mkdir(parents=True)
        for path in paths:
            os.rename(path, destination / path.name)
    return destination


def set_metrics_aside(directory: Path) -> str | None:
    """Move the metrics of a run that has no checkpoint to earlier/N; return a message, or None.

    Its checkpoints were removed, or it ended before the first one.

    Raises:
        TrainingError: a file cannot be moved.
    """
    journal = directory / METRICS_NAME
    if not journal.is_file() or not journal.stat().st_size:
        return None
    # Without its record, the copies in an object store are left as they are too.
    destination = set_aside(directory, {METRICS_NAME, "tensorboard", UPLOAD_RECORD})
    return (
        f"{directory} has metrics of an earlier run, but no checkpoint of it: started at step 0, "
        f"and moved them to {destination}"
    )
