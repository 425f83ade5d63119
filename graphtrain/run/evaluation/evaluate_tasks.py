"""Evaluation of a model on tasks of lm-eval."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphtrain.run.agreement import on_all_ranks
from graphtrain.run.evaluation.answer_journal import AnswerJournal
from graphtrain.run.evaluation.shared_requests import Compute, answer_together, computation
from graphtrain.run.evaluation.task_results import TaskResults, metric_values
from graphtrain.run.evaluation.task_settings import RANDOM_SEED, SEED, Progress, TaskSettings
from graphtrain.run.evaluation.text_format import TextFormat
from graphtrain.run.evaluation_curve import EvaluationCurve
from graphtrain.run.processes import is_rank_zero
from graphtrain.run.serving.row_engine import RowEngine
from lowering.machine.extras import optional_import

if TYPE_CHECKING:
    from graphtrain.run.evaluation.loaded_tasks import LoadedTasks


def evaluate_tasks(
    settings: TaskSettings,
    open_model: Callable[[], tuple[RowEngine, TextFormat]],
    identity: dict[str, Any],
    journal_path: Path,
    progress: Progress,
) -> TaskResults:
    """Evaluate a model; answers of an evaluation that was interrupted are not computed again.

    With several processes, each of them calls this; rank 0 alone returns the samples too.

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
    with tempfile.TemporaryDirectory(
        prefix="graphtrain-tasks-", ignore_cleanup_errors=True
    ) as scratch:
        tasks = _load_on_rank_zero(settings, Path(scratch))
        engine, text = open_model()
        return evaluate_loaded(tasks, engine, text, identity, journal_path, progress)


def evaluate_steps(
    settings: TaskSettings,
    steps: Sequence[int],
    open_step: Callable[[int], tuple[RowEngine, TextFormat]],
    identify: Callable[[int], tuple[dict[str, Any], Path]],
    progress: Progress,
) -> EvaluationCurve:
    """Evaluate checkpoints, one after the other, on the same requests.

    Args:
        settings: What is evaluated.
        steps: Steps of the checkpoints.
        open_step: Returns the model with the weights of a step; that of the step before is lost.
        identify: Returns the identity of the model of a step, and the file of its answers.
        progress: Called as requests are answered.

    Raises:
        DataError: a task, a file or a field is missing.
        MissingProgram: a program is not compiled.
        UserError: something else that the user can change.
    """
    values: dict[str, dict[int, float]] = {}
    errors: dict[str, dict[int, float]] = {}
    members: set[str] = set()
    with tempfile.TemporaryDirectory(
        prefix="graphtrain-tasks-", ignore_cleanup_errors=True
    ) as scratch:
        tasks = _load_on_rank_zero(settings, Path(scratch))
        for step in steps:
            document = evaluate_loaded(tasks, *open_step(step), *identify(step), progress).document
            for table, are_errors in ((values, False), (errors, True)):
                for name, value in metric_values(document["results"], errors=are_errors).items():
                    table.setdefault(name, {})[step] = value
            members.update(*document.get("group_subtasks", {}).values())
    return EvaluationCurve(values, errors, frozenset(members))


def _load_on_rank_zero(settings: TaskSettings, scratch: Path) -> LoadedTasks | None:
    """Return the tasks on rank 0, which alone reads them, and None on the other ranks."""

    def load() -> LoadedTasks:
        with optional_import("an evaluation of tasks"):
            from graphtrain.run.evaluation.loaded_tasks import LoadedTasks
        return LoadedTasks(settings, scratch)

    return on_all_ranks(lambda: load() if is_rank_zero() else None)


def evaluate_loaded(
    tasks: LoadedTasks | None,
    engine: RowEngine,
    text: TextFormat,
    identity: dict[str, Any],
    journal_path: Path,
    progress: Progress,
) -> TaskResults:
    """Evaluate a model on tasks that are loaded, as `evaluate_tasks` does."""

    def lead(compute: Compute) -> TaskResults:
        assert tasks is not None, "rank 0 loads them"
        return _evaluate_alone(tasks, engine, text, identity, journal_path, progress, compute)

    compute = computation(engine, text.tokenizer)
    return answer_together(lead, compute, TaskResults.json, TaskResults.without_samples)


def _evaluate_alone(
    tasks: LoadedTasks,
    engine: RowEngine,
    text: TextFormat,
    identity: dict[str, Any],
    journal_path: Path,
    progress: Progress,
    compute: Compute,
) -> TaskResults:
    """Evaluate a model on rank 0."""
    from graphtrain.run.evaluation.harness_model import EngineModel

    began = time.time()
    with AnswerJournal(journal_path) as journal:
        model = EngineModel(engine, text, journal, progress, compute)
        tasks.check_requests(model)
        results = tasks.evaluate(model, is_chat=text.chat is not None)
    results |= _settings_as_lm_eval(tasks.settings, model.max_length, began)
    samples = results.pop("samples")
    for configuration in results["configs"].values():  # a path in a directory that is gone
        (configuration.get("metadata") or {}).pop("config_source", None)
    origin = identity | {
        "chat_template": None if text.chat is None else text.chat.template.text,
        "data": tasks.digests,
        "reused_answers": journal.reused,
        "cut_texts": model.cut,
    }
    return TaskResults(results | {"graphtrain": origin}, samples)


def _settings_as_lm_eval(settings: TaskSettings, context: int, began: float) -> dict[str, Any]:
    """Return what lm-eval's own command records beside the results."""
    configuration = {
        "model": "graphtrain",
        "model_args": None,
        "limit": settings.limit,
        "num_fewshot": settings.fewshot,
        "bootstrap_iters": 100000,
        "random_seed": RANDOM_SEED,
        "numpy_seed": SEED,
        "fewshot_seed": SEED,
    }
    return {
        "config": configuration,
        "date": began,
        "lm_eval_version": version("lm_eval"),
        "max_length": context,
        "total_evaluation_time_seconds": str(time.time() - began),
    }
