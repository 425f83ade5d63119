"""Tasks of lm-eval with local data: their settings are those of lm-eval, their files are not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from graphtrain.errors import DataError, GraphtrainError
from graphtrain.run.evaluation import code_sandbox
from graphtrain.run.evaluation.task_catalog import TaskCatalog
from graphtrain.run.evaluation.task_data import TaskData


@contextmanager
def quiet() -> Iterator[None]:
    """Let lm-eval and its packages print nothing in the block."""
    import datasets

    datasets.disable_progress_bars()
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "evaluate")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def find_tasks(
    words: Sequence[str], root: Path | None, fewshot: int | None
) -> tuple[list[TaskData], TaskCatalog]:
    """Return the tasks that words stand for, with their files.

    Args:
        words: Names of tasks, groups and tags of lm-eval, and files of tasks.
        root: Directory of the data; None if every task names files of its own.
        fewshot: Number of examples in a prompt; None for that of each task.

    Raises:
        DataError: there is no such task, or it needs data and there is no directory.
    """
    catalog = TaskCatalog()
    found = {task.name: task for word in words for task in catalog.tasks(word)}
    if not found:
        raise DataError(f"--tasks {','.join(words)}: names no task")
    tasks = [TaskData(task, root or Path(), fewshot) for task in found.values()]
    for task in tasks:
        if root is None and not task.has_files_of_its_own:
            raise DataError(
                f"the task {task.task.name} reads data; name its directory with --data DIR"
            )
    return tasks, catalog


def load_tasks(
    words: Sequence[str], tasks: Sequence[TaskData], catalog: TaskCatalog, scratch: Path
) -> Any:
    """Return the loaded tasks and groups of lm-eval.

    Args:
        words: What the user named.
        tasks: The tasks that it stands for.
        catalog: Where they were found.
        scratch: Directory for settings and for files of the package `datasets`.

    Raises:
        DataError: a file or a field is missing; the message names it.
    """
    from lm_eval.tasks import TaskManager

    folder = scratch / "tasks"
    folder.mkdir()
    local = [task for task in tasks if not task.has_files_of_its_own]
    for task in local:
        task.check_files()
        task.rows(scratch / "datasets")
        _write(folder, task.task.name, task.settings(scratch / "datasets"))
    for name, path in catalog.groups.items():
        _write(folder, f"group {name}", {"include": str(path), "group": name})
    own = [task for task in tasks if task.has_files_of_its_own]
    for task in own:
        task.rows(scratch / "datasets")
        _write(folder, task.task.name, {"include": str(task.task.path), "task": task.task.name})
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    by_path = {task.task.path: task.task.name for task in tasks}
    groups = {path: name for name, path in catalog.groups.items()}
    names = []
    for word in words:
        path = Path(word).resolve()
        names.append(by_path.get(path) or groups.get(path) or word)
    with _metrics_offline():
        return _loaded(manager, list(dict.fromkeys(names)))


def _loaded(manager: Any, names: list[str]) -> Any:
    try:
        return manager.load(names)
    except GraphtrainError:
        raise
    except Exception as error:  # functions of tasks, templates, datasets: nothing in common
        cause = error.__cause__ or error  # `datasets` says what is wrong in the cause alone
        word = f"{type(cause).__name__}: {cause}".partition("\n")[0][:500]
        raise DataError(
            f"the tasks {', '.join(names)} cannot be loaded from their data ({word}); "
            "look at their files, and at the splits and fields that they name"
        ) from error


def _write(folder: Path, name: str, settings: dict[str, Any]) -> None:
    text = yaml.safe_dump(settings, allow_unicode=True, sort_keys=False)
    (folder / f"{name.replace('/', '_')}.yaml").write_text(text, encoding="utf-8")


@contextmanager
def _metrics_offline() -> Iterator[None]:
    """Let tasks load metrics of the package `evaluate`: code runs contained, none is fetched."""
    import evaluate

    original: Callable[..., Any] = evaluate.load

    def load(path: str, *arguments: Any, **settings: Any) -> Any:
        if path == "code_eval":
            return code_sandbox.CodeEvaluation()
        try:
            return original(path, *arguments, **settings)
        except Exception as error:
            raise DataError(
                f"a task needs the metric {path} of the package evaluate, which is not on this "
                "machine; fetch it once on a connected machine, and copy the cache of Hugging Face"
            ) from error

    evaluate.load = load
    try:
        yield
    finally:
        evaluate.load = original
