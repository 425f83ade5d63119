"""Tasks of lm-eval with their data, on which any number of models are evaluated in turn."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any

import numpy as np

from graphtrain.errors import DataError, UserError
from graphtrain.run.evaluation.code_sandbox import (
    check_available,
    prompts_of_tests,
    reports_of_programs,
)
from graphtrain.run.evaluation.harness_model import EngineModel
from graphtrain.run.evaluation.harness_tasks import find_tasks, load_tasks, quiet
from graphtrain.run.evaluation.task_data import TaskData
from graphtrain.run.evaluation.task_rows import check_examples, check_rows
from graphtrain.run.evaluation.task_settings import RANDOM_SEED, SEED, TaskSettings


class LoadedTasks:
    """Tasks of lm-eval with their data. Each evaluation draws the same random numbers.

    The global random numbers of Python and NumPy are left as they were.
    """

    def __init__(self, settings: TaskSettings, scratch: Path) -> None:
        """Find and load the tasks, and check their files.

        Args:
            settings: What is evaluated.
            scratch: Directory for files of lm-eval and of the package `datasets`, which are read as
                long as the tasks are used.

        Raises:
            DataError: a task, a file or a field is missing.
        """
        self.settings = settings
        with quiet(), _own_random_numbers():
            tasks, catalog = find_tasks(settings.tasks, settings.data, settings.fewshot)
            _check_code(tasks, settings.allow_code)
            random.seed(RANDOM_SEED)  # before the tasks, as lm-eval: some shuffle choices then
            np.random.seed(SEED)
            self._loaded = load_tasks(settings.tasks, tasks, catalog, scratch)
            self._set_examples()
            for task in tasks:
                loaded = self._tasks[task.task.name]
                if not task.has_files_of_its_own:
                    task.check_files(loaded.get_config("num_fewshot"))
                check_rows(loaded, task, settings.limit)
                check_examples(loaded, task)
            self._random_state = random.getstate(), np.random.get_state()
        self.digests = {task.task.name: task.digests() for task in tasks}

    def check_requests(self, model: EngineModel) -> None:
        """Check that a model has room for what the tasks generate.

        Raises:
            DataError: a task generates more than the context holds, or asks for something unknown.
        """
        for name, task in self._tasks.items():
            if task.OUTPUT_TYPE == "generate_until":
                model.check_generation(task.get_config("generation_kwargs") or {}, name)

    def evaluate(
        self, model: EngineModel, *, is_chat: bool, bootstrap_iterations: int = 100_000
    ) -> dict[str, Any]:
        """Evaluate a model.

        Args:
            model: The model.
            is_chat: Whether prompts are conversations.
            bootstrap_iterations: Number of samples from which errors are estimated; 0: none are.

        Returns:
            The results as lm-eval returns them. A sample whose answer was run as code has
            "code_eval" too: "passed" or why it failed, of each program.

        Raises:
            DataError: lm-eval cannot make prompts or metrics of a row.
        """
        from lm_eval.evaluator import evaluate

        with (
            _errors_of_tasks(self.settings),
            quiet(),
            _own_random_numbers(),
            prompts_of_tests(self._prompts()),
            reports_of_programs() as reports,
        ):
            python_state, numpy_state = self._random_state
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            self._set_examples()
            results: Any = evaluate(
                lm=model,
                task_dict=self._loaded,
                limit=self.settings.limit,
                bootstrap_iters=bootstrap_iterations,
                apply_chat_template=is_chat,
                fewshot_as_multiturn=is_chat,
                confirm_run_unsafe_code=self.settings.allow_code,
            )
        for name, task in self._tasks.items():
            for sample in results["samples"].get(name, ()) if _runs_code(task) else ():
                test, answers = str(sample["target"]), sample["filtered_resps"]
                programs = (one for given in answers if isinstance(given, list) for one in given)
                sample["code_eval"] = [reports.get((test, program)) for program in programs]
        return dict(results)

    def _prompts(self) -> dict[str, str]:
        """Return the prompt of each test of tasks that run code, where the program continues it."""
        if not self.settings.allow_code:
            return {}
        return {
            str(task.doc_to_target(row)): row["prompt"]
            for task in self._tasks.values()
            if _runs_code(task)
            for _, row in task.doc_iterator(limit=self.settings.limit)
            if isinstance(row.get("prompt"), str)
        }

    @property
    def _tasks(self) -> dict[str, Any]:
        return self._loaded["tasks"]

    def _set_examples(self) -> None:
        """Set the number of examples of each task and the seed that chooses them, as lm-eval."""
        fewshot = self.settings.fewshot
        for task in self._tasks.values():
            own = task.get_config("num_fewshot")
            if fewshot is not None and own != 0:
                task.set_config(key="num_fewshot", value=fewshot)
            elif own is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=SEED)


def _runs_code(task: Any) -> bool:
    return getattr(task, "UNSAFE_CODE", False)  # lm-eval sets it where it is true


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


@contextmanager
def _errors_of_tasks(settings: TaskSettings) -> Iterator[None]:
    """Say in one line what lm-eval, or the function of a task, cannot do in the block.

    An error that passes through graphtrain is raised as it is: it is not that of a task.
    """
    try:
        yield
    except Exception as error:
        modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
        if isinstance(error, UserError) or any(
            name.startswith(("graphtrain.", "lowering.")) and name != __name__ for name in modules
        ):
            raise
        word = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        examples = "" if settings.fewshot is None else f" with {settings.fewshot} examples"
        raise DataError(
            f"lm-eval cannot evaluate {', '.join(settings.tasks)}{examples} ({word}); look at the "
            "rows and at the settings of the task, or leave it out"
        ) from error


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Restore the state of the global random numbers after the block."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
