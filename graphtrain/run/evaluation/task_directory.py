"""Directory with the data of tasks: what is in it, and a program that fills it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphtrain.errors import DataError
from graphtrain.run.evaluation.harness_tasks import find_tasks, quiet
from graphtrain.run.evaluation.task_data import TaskData

_SCRIPT = '''"""Fills {root} with the data of tasks of lm-eval. Run it once on a connected machine.

    pip install datasets
    python FILE
"""

import pathlib

import datasets

ROOT = pathlib.Path({root!r})
TASKS = [  # folder, dataset, configuration, splits, options
{tasks}]

for folder, dataset, configuration, splits, options in TASKS:
    for split in splits:
        file = ROOT / folder / f"{{split}}.jsonl"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            table = datasets.load_dataset(dataset, configuration, split=split, **options)
            partial = file.with_suffix(".partial")
            table.to_json(str(partial), force_ascii=False)
            partial.rename(file)
            print(file, len(table))
'''


@dataclass(frozen=True)
class TaskReport:
    """Data of one task."""

    task: str
    files: dict[str, dict[str, Any]]  # path, rows and digest of each file, by split
    problem: str | None = None  # why the task cannot be evaluated


def check_directory(words: Sequence[str], root: Path) -> list[TaskReport]:
    """Check the files of tasks: that they exist, their fields and rows; return their digests.

    Raises:
        DataError: there is no such task.
    """
    with (
        quiet(),
        tempfile.TemporaryDirectory(prefix="graphtrain-tasks-", ignore_cleanup_errors=True) as at,
    ):
        tasks, _ = find_tasks(words, root, None)
        return [_checked(task, Path(at)) for task in tasks]


def fill_script(words: Sequence[str], root: Path) -> str:
    """Return a program of Python that writes the files of tasks, on a connected machine.

    Raises:
        DataError: there is no such task.
    """
    with quiet():
        tasks, _ = find_tasks(words, root, None)
    lines = dict.fromkeys(_line(task) for task in tasks if not task.has_files_of_its_own)
    return _SCRIPT.format(root=str(root), tasks="".join(lines))


def _checked(task: TaskData, scratch: Path) -> TaskReport:
    try:
        if task.has_files_of_its_own:
            return TaskReport(task.task.name, {})
        task.check_files()
        rows, digests = task.rows(scratch), task.digests()
    except DataError as error:
        return TaskReport(task.task.name, {}, str(error))
    files = {split: {**digests[split], "rows": rows[split]} for split in digests}
    return TaskReport(task.task.name, files)


def _line(task: TaskData) -> str:
    settings = task.task.settings
    options = dict(settings.get("dataset_kwargs") or {})
    options.pop("trust_remote_code", None)  # not known to the package datasets any more
    splits = list(dict.fromkeys(filter(None, (task.evaluated, task.examples))))
    dataset = settings.get("dataset_path"), settings.get("dataset_name")
    return f"    {(task.task.name, *dataset, splits, options)!r},\n"
