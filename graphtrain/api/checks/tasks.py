"""Problems of run.tasks: its tasks and their data, and hosts that cannot evaluate them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from graphtrain.api.checks.problem import Problem
from graphtrain.api.checks.samples import hosts_of
from graphtrain.config.schema import Config, Program, Tasks
from graphtrain.config.serving_program import context_of_serving
from graphtrain.errors import DataError, UserError
from lowering.machine.extras import is_installed, missing_extra

_TASKS = ("run", "tasks")
_NAMES, _DATA = (*_TASKS, "names"), (*_TASKS, "data")
_LATER = "evaluate its checkpoints instead: graphtrain evaluate RUN --tasks NAMES"


def tasks_problems(config: Config) -> Iterator[Problem]:
    """Yield what keeps a run from evaluating run.tasks."""
    tasks = config.run.tasks
    if tasks is None:
        return
    target = config.program.target
    if hosts_of(target) > 1 and (moved := _moved_weights(config.program)):
        message = (
            f'run.tasks does not support {moved} on several hosts (program.target = "{target}"), '
            f"where the weights would have to be moved; {_LATER}"
        )
        yield Problem("program", message, (_TASKS,))
    if not is_installed("lm_eval"):
        yield Problem("machine", str(missing_extra("lm_eval", "run.tasks")), (_TASKS,))
        return
    if tasks.data is not None and not Path(tasks.data).is_dir():
        message = f'run.tasks.data = "{tasks.data}": no such directory'
        yield Problem("missing_data", message, (_DATA,))
        return
    for loading in _loading_problems(config, tasks):  # names only what is found first
        yield from list(_task_problems(tasks)) or [loading]


def _moved_weights(program: Program) -> str | None:
    """Return what makes the weights of training differ in layout from those of an evaluation."""
    if program.adapter is not None:
        return "program.adapter"
    axes = (axis for axis in ("stage", "context") if getattr(program.mesh, axis) != 1)
    return next((f"program.mesh.{axis}" for axis in axes), None)


def _task_problems(tasks: Tasks) -> Iterator[Problem]:
    """Yield which tasks are unknown, run code, or have no data."""
    from graphtrain.run.evaluation.harness_tasks import quiet
    from graphtrain.run.evaluation.task_catalog import TaskCatalog
    from graphtrain.run.evaluation.task_data import TaskData

    catalog, root = TaskCatalog(), Path(tasks.data or "")
    for word in tasks.names:
        try:
            with quiet():
                found = [TaskData(task, root, tasks.fewshot) for task in catalog.tasks(word)]
        except DataError as error:
            yield _problem(error)
            continue
        for one in found:
            name = one.task.name
            if one.task.runs_code:
                message = f"the task {name} runs code that the model writes, which no run in "
                yield _problem(f"{message}training does; {_LATER}, with --allow-code")
            if one.has_files_of_its_own:
                continue
            if tasks.data is None:
                message = f"run.tasks.data is not set, and the task {name} reads data"
                yield Problem("data", message, (_TASKS,))
                continue
            try:
                one.check_files()
            except DataError as error:
                yield Problem("missing_data", f"run.tasks.data: {error}", (_DATA,))


def _loading_problems(config: Config, tasks: Tasks) -> Iterator[Problem]:
    """Yield why the tasks cannot be loaded, if they cannot."""
    from graphtrain.run.prompt import run_tokenizer
    from graphtrain.run.training_tasks import open_tasks

    try:
        run_tokenizer(config)
    except UserError as error:  # it may be with data or weights that another machine has
        yield Problem("missing_data", f"run.tasks: {error}", (_TASKS,))
        return
    context = context_of_serving(config.program)
    with tempfile.TemporaryDirectory(
        prefix="graphtrain-tasks-", ignore_cleanup_errors=True
    ) as scratch:
        try:
            open_tasks(config, tasks, context, Path(scratch))
        except DataError as error:
            yield Problem("data", f"run.tasks: {error}", (_TASKS,))


def _problem(error: object) -> Problem:
    words = str(error).removeprefix("--tasks ")
    return Problem("data", f"run.tasks.names: {words}", (_NAMES,))
