"""Files that a task's settings name themselves, by dataset_kwargs.data_files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphtrain.errors import DataError
from graphtrain.run.evaluation.task_catalog import TaskFile

_FORMATS = ("json", "parquet", "csv", "text", "arrow", "pandas", "xml")  # of the package `datasets`
_PLACES = ("data_files", "data_dir", "cache_dir", "trust_remote_code")


def names_files(task: TaskFile) -> bool:
    """Return whether the settings of a task name files."""
    return "data_files" in _settings(task)


def find_files(task: TaskFile) -> dict[str, list[Path]]:
    """Return the local files that the settings of a task name, by split.

    None of another dataset than one of local files, which is loaded as it is.

    Raises:
        DataError: there is no such file.
    """
    from datasets.data_files import resolve_pattern, sanitize_patterns

    settings = _settings(task)
    if task.settings.get("dataset_path") not in _FORMATS:
        return {}
    base = str(Path(settings.get("data_dir") or "").expanduser().resolve())
    try:
        named = sanitize_patterns(settings["data_files"])
    except (TypeError, ValueError) as error:
        raise DataError(f"{task.path}: dataset_kwargs.data_files: {error}") from None
    found: dict[str, list[Path]] = {}
    for split, patterns in named.items():
        for pattern in patterns:
            if "://" in pattern:
                continue
            try:
                found.setdefault(split, []).extend(map(Path, resolve_pattern(pattern, base)))
            except FileNotFoundError:
                raise DataError(
                    f"{task.name}: {Path(base, pattern)}: no such file; "
                    f"dataset_kwargs.data_files of {task.path} names it"
                ) from None
    return found


def read_options(task: TaskFile) -> dict[str, Any]:
    """Return how the package `datasets` reads the files, such as the separator of a CSV."""
    return {name: value for name, value in _settings(task).items() if name not in _PLACES}


def _settings(task: TaskFile) -> dict[str, Any]:
    return task.settings.get("dataset_kwargs") or {}
