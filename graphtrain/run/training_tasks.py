"""Scores of a run in training on tasks of lm-eval."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from graphtrain.config.schema import Config, Tasks
from graphtrain.run.evaluation.answer_journal import NoAnswers
from graphtrain.run.evaluation.harness_model import EngineModel
from graphtrain.run.evaluation.loaded_tasks import LoadedTasks
from graphtrain.run.evaluation.shared_requests import Compute, answer_together, computation
from graphtrain.run.evaluation.task_results import metric_values
from graphtrain.run.evaluation.task_settings import TaskSettings
from graphtrain.run.evaluation.text_format import TextFormat, open_text_format
from graphtrain.run.serving.chat_format import OWN_TEMPLATE
from graphtrain.run.serving.row_engine import RowEngine
from graphtrain.run.training_engine import TrainingEngine
from lowering.trees import Tree


class _Stopped(Exception):
    """The run is asked to stop."""


class TrainingTasks:
    """Tasks of a run, loaded once, and the programs that evaluate them."""

    def __init__(self, tasks: LoadedTasks, text: TextFormat, engine: TrainingEngine) -> None:
        """Keep the tasks of a run, as `open_tasks` returns them, and its programs."""
        self._tasks, self._text, self._engine = tasks, text, engine

    def scores(
        self, step: int, parameters: Tree, should_stop: Callable[[int], bool]
    ) -> dict[str, float] | None:
        """Return the metrics of the tasks with the weights of a step, by name.

        Args:
            step: Number of completed steps.
            parameters: Trained parameters, on the devices.
            should_stop: Called with each answer, on all ranks, with the number of those before it;
                if true, None is returned.
        """
        answers = itertools.count()

        def on_answer() -> None:
            if should_stop(next(answers)):
                raise _Stopped

        with self._engine.open(parameters, step, self._text.tokenizer.vocab) as engine:
            compute = computation(engine, self._text.tokenizer, on_answer)
            try:
                return answer_together(partial(self._lead, engine), compute, json.dumps, json.loads)
            except _Stopped:
                return None

    def _lead(self, engine: RowEngine, compute: Compute) -> dict[str, float]:
        """Return the metrics of the tasks on rank 0."""
        model = EngineModel(engine, self._text, NoAnswers(), _ignore_progress, compute)
        is_chat = self._text.chat is not None
        results = self._tasks.evaluate(model, is_chat=is_chat, bootstrap_iterations=0)
        return metric_values(results["results"])


def open_tasks(
    config: Config, tasks: Tasks, context_length: int, scratch: Path
) -> tuple[LoadedTasks, TextFormat]:
    """Load and check the tasks of a run.

    Args:
        config: The run.
        tasks: Its run.tasks.
        context_length: Number of tokens of a prompt and its answer, at most.
        scratch: Directory for files of lm-eval, as long as the tasks are used.

    Raises:
        DataError: a task, its data, a field, or the tokenizer is missing; or a task generates more
            than the context has room for.
    """
    template = OWN_TEMPLATE if tasks.apply_chat_template else None
    text = open_text_format(config, template)
    loaded = LoadedTasks(
        TaskSettings(
            tasks=tasks.names,
            data=None if tasks.data is None else Path(tasks.data),
            limit=tasks.limit,
            fewshot=tasks.fewshot,
        ),
        scratch,
    )
    room = cast(RowEngine, _ContextLength(context_length))
    loaded.check_requests(EngineModel(room, text, NoAnswers(), _ignore_progress))
    return loaded, text


@dataclass(frozen=True)
class _ContextLength:
    """Size of an engine that does not exist yet, because there are no weights."""

    context_length: int


def _ignore_progress(kind: str, finished: int, count: int) -> None:
    """Ignore the progress."""
