"""Evaluation of a model on tasks of lm-eval."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.errors import DataError
from graphtrain.run.evaluation.answer_journal import AnswerJournal
from graphtrain.run.evaluation.code_sandbox import check_available
from graphtrain.run.evaluation.harness_model import EngineModel, Progress, TextFormat
from graphtrain.run.evaluation.harness_tasks import find_tasks, load_tasks, quiet
from graphtrain.run.evaluation.task_data import TaskData
from graphtrain.run.evaluation.task_results import TaskResults
from graphtrain.run.serving.engine_protocol import Engine

_SEED = 1234  # of the choice of examples; that of lm-eval
_RANDOM_SEED = 0


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Settings of an evaluation on tasks."""

    tasks: tuple[str, ...]  # names of tasks, groups and tags, and files of tasks
    data: Path | None = None  # directory of their data; None: the tasks name files
    limit: int | None = None  # rows of each task; None: all
    fewshot: int | None = None  # examples in a prompt; None: as each task says
    allow_code: bool = False  # run code that the model wrote, confined


def evaluate_tasks(
    settings: TaskSettings,
    open_model: Callable[[], tuple[Engine, TextFormat]],
    identity: dict[str, Any],
    journal_path: Path,
    progress: Progress,
) -> TaskResults:
    """Evaluate a model; answers of an evaluation that was interrupted are not computed again.

    Args:
        settings: What is evaluated.
        open_model: Opens the model, once the tasks and their data are checked.
        identity: What the answers of the model depend on, and the name of the run.
        journal_path: File of the answers of this model.
        progress: Called as requests are answered.

    Raises:
        DataError: a task, a file or a field is missing.
        MissingProgram: a program is not compiled.
        UserError: something else that the user can change.
    """
    with (
        quiet(),
        tempfile.TemporaryDirectory(prefix="graphtrain-tasks-", ignore_cleanup_errors=True) as at,
    ):
        tasks, catalog = find_tasks(settings.tasks, settings.data, settings.fewshot)
        _check_code(tasks, settings.allow_code)
        random.seed(_RANDOM_SEED)  # before the tasks, as lm-eval: some shuffle choices when loaded
        np.random.seed(_SEED)
        loaded = load_tasks(settings.tasks, tasks, catalog, Path(at))
        _set_examples(loaded["tasks"], settings.fewshot)
        for task in tasks:
            if not task.has_files_of_its_own:
                task.check_files(loaded["tasks"][task.task.name].get_config("num_fewshot"))
        digests = {task.task.name: task.digests() for task in tasks}
        engine, text = open_model()
        with AnswerJournal(journal_path) as journal:
            model = EngineModel(engine, text, journal, progress)
            results = _evaluate(model, loaded, settings, is_chat=text.chat is not None)
    samples = results.pop("samples")
    for configuration in results["configs"].values():  # a path in a directory that is gone
        (configuration.get("metadata") or {}).pop("config_source", None)
    origin = identity | {
        "chat_template": None if text.chat is None else text.chat.template.text,
        "data": digests,
        "reused_answers": journal.reused,
    }
    return TaskResults(results | {"graphtrain": origin}, samples)


def _evaluate(
    model: EngineModel, loaded: Any, settings: TaskSettings, *, is_chat: bool
) -> dict[str, Any]:
    """Return the document of lm-eval, with the settings that its own command records."""
    from lm_eval.evaluator import evaluate

    began = time.time()
    results: Any = evaluate(
        lm=model,
        task_dict=loaded,
        limit=settings.limit,
        apply_chat_template=is_chat,
        fewshot_as_multiturn=is_chat,
        confirm_run_unsafe_code=settings.allow_code,
    )
    configuration = {
        "model": "graphtrain",
        "model_args": None,
        "limit": settings.limit,
        "num_fewshot": settings.fewshot,
        "bootstrap_iters": 100000,
        "random_seed": _RANDOM_SEED,
        "numpy_seed": _SEED,
        "fewshot_seed": _SEED,
    }
    return dict(results) | {
        "config": configuration,
        "date": began,
        "lm_eval_version": version("lm_eval"),
        "max_length": model.max_length,
        "total_evaluation_time_seconds": str(time.time() - began),
    }


def _set_examples(tasks: dict[str, Any], fewshot: int | None) -> None:
    """Set the number of examples of each task and the seed that chooses them, as lm-eval does."""
    for task in tasks.values():
        own = task.get_config("num_fewshot")
        if fewshot is not None and own != 0:
            task.set_config(key="num_fewshot", value=fewshot)
        elif own is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=_SEED)


def _check_code(tasks: Sequence[TaskData], allow_code: bool) -> None:
    runs = [task.task.name for task in tasks if task.task.runs_code]
    if runs and not allow_code:
        raise DataError(
            f"the task {runs[0]} runs code that the model writes; pass --allow-code to run it, "
            "confined: without network, new processes and writing, with limits of memory and time"
        )
    for task in tasks:
        if task.task.runs_code and not task.task.can_confine_code:
            raise DataError(
                f"the task {task.task.name} runs code that the model writes by its own means, not "
                "by the metric code_eval, so that graphtrain cannot confine it; leave it out"
            )
    if runs:
        check_available()
