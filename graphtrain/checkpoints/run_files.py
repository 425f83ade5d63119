"""Files of a run beside its checkpoints, which go to an object store with each of them.

With them a run resumes, or is exported, on a machine that has nothing of it.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from graphtrain.config.hf_config import HF_FILES
from graphtrain.config.run_record import CONFIG, RECORD

METRICS = "metrics.jsonl"
_NAMES = (CONFIG, RECORD, "base.json", f"{HF_FILES}.json")


def copy_run_files(
    run_directory: Path, directory: Path, journal: Mapping[str, Any] | None
) -> dict[str, Path]:
    """Copy the files of a run that exist, the metrics up to a checkpoint; return them by name.

    Args:
        run_directory: Directory of the run.
        directory: Where to copy the metrics, to which the run appends meanwhile.
        journal: Position in the metrics that the checkpoint recorded.
    """
    files = dict(_static_files(run_directory))
    source = run_directory / METRICS
    if journal is not None and source.is_file():
        with source.open("rb") as full, (directory / METRICS).open("wb") as part:
            part.write(full.read(journal["bytes"]))
        files[METRICS] = directory / METRICS
    return files


def _static_files(run_directory: Path) -> Iterator[tuple[str, Path]]:
    for name in _NAMES:
        if (run_directory / name).is_file():
            yield name, run_directory / name
    for path in sorted((run_directory / HF_FILES).rglob("*")):
        if path.is_file():
            yield path.relative_to(run_directory).as_posix(), path


def install_run_files(directory: Path, run_directory: Path) -> None:
    """Move downloaded files into the directory of a run that lacks them.

    Metrics that are the beginning of the downloaded ones are replaced by these.
    """
    for source in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = source.relative_to(directory)
        if len(name.parts) > 1 and name.parts[0] != HF_FILES:
            continue
        destination = run_directory / name
        if destination.exists() and not (name.name == METRICS and _begins(destination, source)):
            continue
        destination.parent.mkdir(parents=True, exist_ok=True)
        temporary = destination.with_name(f".{destination.name}.download")
        shutil.copyfile(source, temporary)
        os.replace(temporary, destination)


def _begins(beginning: Path, whole: Path) -> bool:
    """Return whether a file is the beginning of another one."""
    with beginning.open("rb") as first, whole.open("rb") as second:
        while part := first.read(1 << 20):
            if second.read(len(part)) != part:
                return False
    return True
