"""Rows of tasks that no score can be made of: a prompt that fails, an answer that is no choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphtrain.errors import DataError


def check_rows(task: Any, name: str, place: str, fields: Sequence[str], limit: int | None) -> None:
    """Check that each row of a task has a prompt and, of a multiple choice, a right answer.

    lm-eval counts an answer that is no choice as wrong, whatever the model says.

    Args:
        task: Task of lm-eval, with its data.
        name: Name of the task.
        place: Where the rows are, for error messages.
        fields: Names of fields that have no nulls, inside of lists either.
        limit: Number of rows; None for all.

    Raises:
        DataError: a row is unusable; the message names it.
    """
    if not hasattr(task, "doc_to_choice"):  # a class of its own, which reads rows as it likes
        return
    for index, row in task.doc_iterator(limit=limit):
        try:
            nulls = (field for field in fields if _has_null(row.get(field)))
            field = next(nulls, None)
            problem = _problem(task, row) if field is None else f"a null in its field {field!r}"
        except Exception as error:  # of templates and functions of the task: nothing in common
            word = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            problem = f"the task cannot read it ({word})"
        if problem is not None:
            raise DataError(f"{name}: row {index + 1} of {place}: {problem}")


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


def _has_null(value: Any) -> bool:
    """Return whether a list, or an object in it, has a null: a prompt would say "None"."""
    if isinstance(value, dict):
        return any(map(_has_null, value.values()))
    if isinstance(value, list | tuple):
        return any(one is None or _has_null(one) for one in value)
    return False
