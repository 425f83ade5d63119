"""Rows of tasks that no score can be made of: a prompt that fails, an answer that is no choice."""

from __future__ import annotations

from typing import Any

from graphtrain.errors import DataError
from graphtrain.run.evaluation.task_data import TaskData


def check_rows(task: Any, data: TaskData, limit: int | None) -> None:
    """Check that each row of a task has a prompt and, of a multiple choice, a right answer.

    lm-eval counts an answer that is no choice as wrong, whatever the model says.

    Args:
        task: Task of lm-eval, with its data.
        data: Its files.
        limit: Number of rows; None for all.

    Raises:
        DataError: a row is unusable; the message names it.
    """
    if not hasattr(task, "doc_to_choice"):  # a class of its own, which reads rows as it likes
        return
    fields, of_whole_column = data.fields, None  # fields have no nulls, inside of lists either
    for index, row in task.doc_iterator(limit=limit):
        try:
            nulls = (field for field in fields if _has_null(row.get(field)))
            field = next(nulls, None)
            problem = _problem(task, row) if field is None else f"a null in its field {field!r}"
        except Exception as error:  # of templates and functions of the task: nothing in common
            word = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            problem = f"the task cannot read it ({word})"
        if problem is None:
            continue
        error = DataError(f"{data.task.name}: row {index + 1} of {data.place}: {problem}")
        if not _is_whole_float(task, row):
            raise error
        of_whole_column = of_whole_column or error
    if of_whole_column is not None:
        raise of_whole_column


def _problem(task: Any, row: Any) -> str | None:
    """Return what is wrong with a row."""
    prompt, target = task.doc_to_text(row), task.doc_to_target(row)
    if task.OUTPUT_TYPE != "multiple_choice":
        return None
    choices = task.doc_to_choice(row)
    answer = prompt if task.multiple_input else target
    for one in answer if isinstance(answer, list | tuple) else [answer]:
        is_index = isinstance(one, int)  # also a bool
        if not (0 <= one < len(choices) if is_index else one in choices):
            return (
                f"its answer {one!r} is none of the {len(choices)} choices; test sets whose "
                "answers are hidden cannot be evaluated"
            )
    return None


def _is_whole_float(task: Any, row: Any) -> bool:
    """Return whether the answer of a row is 1.0 or the like, because that of another row is 0.5."""
    try:
        answer = task.doc_to_target(row)
    except Exception:  # as in check_rows
        return False
    return isinstance(answer, float) and answer.is_integer()


def _has_null(value: Any) -> bool:
    """Return whether a list, or an object in it, has a null: a prompt would say "None"."""
    if isinstance(value, dict):
        return any(map(_has_null, value.values()))
    if isinstance(value, list | tuple):
        return any(one is None or _has_null(one) for one in value)
    return False
