"""Starting again in the directory of a run, without losing what is in it."""

import os
from pathlib import Path

from graphtrain.files import write_errors
from graphtrain.run.directory_lock import LEASE

_FOLDER = "earlier"


def set_aside(directory: Path) -> Path | None:
    """Move all files of the run in a directory to its folder earlier/N; return that folder.

    The caller has locked the directory. Returns None if there is nothing to move.

    Raises:
        TrainingError: a file cannot be moved.
    """
    kept_in_place = {_FOLDER, LEASE}
    with write_errors(directory):
        paths = [path for path in directory.iterdir() if path.name not in kept_in_place]
        if not paths:
            return None
        number = 1
        while (destination := directory / _FOLDER / str(number)).exists():
            number += 1
        destination.mkdir(parents=True)
        for path in paths:
            os.rename(path, destination / path.name)
    return destination
