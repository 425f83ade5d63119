"""Directory with the data of tasks: what is in it, and a program that fills it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphtrain.errors import DataError
from graphtrain.run.evaluation.harness_tasks import find_tasks, load_tasks, quiet
from graphtrain.run.evaluation.row_files import listed
from graphtrain.run.evaluation.task_catalog import TaskCatalog
from graphtrain.run.evaluation.task_data import MissingFile, TaskData
from graphtrain.run.evaluation.task_rows import check_examples, check_rows

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
    missing: str | None = None  # which file there is not, if that is the problem


def check_directory(words: Sequence[str], root: Path) -> list[TaskReport]:
    """Check the files of tasks: that they exist, their fields and rows; return their digests.

    Rows of tasks that run code are checked when they are evaluated.

    Raises:
        DataError: there is no such task.
    """
    with (
        quiet(),
        tempfile.TemporaryDirectory(prefix="graphtrain-tasks-", ignore_cleanup_errors=True) as at,
    ):
        tasks, _ = find_tasks(words, root, None)
        folders = (Path(at, str(number)) for number in range(len(tasks)))
        return [_checked(task, folder) for task, folder in zip(tasks, folders, strict=True)]


def errors_of(reports: Sequence[TaskReport], words: Sequence[str], root: Path) -> list[str]:
    """Return the problems of tasks: one of all that have no files, and one of each other task.

    Args:
        reports: What `check_directory` returned.
        words: What the user named.
        root: Directory of the data.
    """
    missing = [report for report in reports if report.missing is not None]
    if len(missing) < 2:
        return [report.problem for report in reports if report.problem is not None]
    names = listed([report.task for report in missing])
    told = (
        f"{root} has no files of {len(missing)} of {len(reports)} tasks: {names}; "
        f"of {missing[0].task}, {missing[0].missing}. graphtrain data tasks {root} "
        f"{' '.join(words)} --script prints what fills it"
    )
    others = [one.problem for one in reports if one.problem is not None and one.missing is None]
    return [told, *others]


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
    scratch.mkdir()
    try:
        if not task.has_files_of_its_own:
            task.check_files()
        rows, digests = task.rows(scratch / "files"), task.digests()
        if not task.task.runs_code:
            name = task.task.name
            loaded = load_tasks([name], [task], TaskCatalog(), scratch)
            check_rows(loaded["tasks"][name], task, None)
            check_examples(loaded["tasks"][name], task)
    except MissingFile as error:
        return TaskReport(task.task.name, {}, str(error), error.reason)
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
