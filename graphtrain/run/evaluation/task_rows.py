"""Rows of tasks that no score can be made of: a prompt that fails, an answer that is no choice."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from graphtrain.errors import DataError
from graphtrain.run.evaluation.task_data import TaskData, fields_of

_KINDS = {str: "a text", list: "a list", dict: "an object"}


def check_rows(task: Any, data: TaskData, limit: int | None) -> None:
    """Check that each row of a task has a prompt and a right answer.

    lm-eval counts an answer that is no choice, or none, as wrong, whatever the model says.

    Args:
        task: Task of lm-eval, with its data.
        data: Its files.
        limit: Number of rows; None for all.

    Raises:
        DataError: a row is unusable; the message names it.
    """
    if hasattr(task, "doc_to_choice"):  # else a class of its own, which reads rows as it likes
        rows = (row for _, row in task.doc_iterator(limit=limit))
        _check(rows, _Templates(task), data, data.place)


def check_examples(task: Any, data: TaskData) -> None:
    """Check the rows that examples are taken from, if prompts have examples, as `check_rows`.

    An answer of -1 would be the last choice, in all prompts.

    Raises:
        DataError: a row is unusable; the message names it.
    """
    shots = task.get_config("num_fewshot")
    if not shots or data.examples is None or not hasattr(task, "sampler"):
        return
    from lm_eval.api.samplers import FirstNSampler

    own = task.fewshot_cfg
    templates = _Templates(task, own.doc_to_text, own.doc_to_target, own.doc_to_choice)
    rows = task.sampler.df
    if shots > len(rows):
        raise DataError(
            f"{data.task.name}: {shots} examples are asked for, and the split {data.examples} has "
            f"{len(rows)} rows; ask for fewer, or add rows"
        )
    if isinstance(task.sampler, FirstNSampler):
        rows = rows[: shots + 1]  # one may be the row that is evaluated
    place = str(data.files.get(data.examples, f"the split {data.examples}"))
    _check(rows, templates, data, place)


@dataclass(frozen=True)
class _Templates:
    """Templates of a task, or those of its examples; None: that of the task."""

    task: Any
    text: Any = None
    target: Any = None
    choice: Any = None

    def problem(self, row: Any) -> str | None:
        """Return what is wrong with a row."""
        task = self.task
        prompt, target = task.doc_to_text(row, self.text), task.doc_to_target(row, self.target)
        if task.OUTPUT_TYPE != "multiple_choice":
            is_empty = isinstance(target, str | list) and not (
                target.strip() if isinstance(target, str) else target
            )
            return "it has no answer" if is_empty and self._target_is_of_row else None
        choices = task.doc_to_choice(row, self.choice)
        answer = prompt if task.multiple_input else target
        answers = answer if isinstance(answer, list | tuple) else [answer]
        for one in answers:
            is_index = isinstance(one, int)  # also a bool
            if not (0 <= one < len(choices) if is_index else one in choices):
                return (
                    f"its answer {one!r} is none of the {len(choices)} choices; test sets whose "
                    "answers are hidden cannot be evaluated"
                )
        return None if answers else "it has no answer"

    def lacks_mark(self, row: Any, mark: str) -> bool:
        """Return whether the answer of a row lacks a mark."""
        target = self.task.doc_to_target(row, self.target)
        return isinstance(target, str) and mark not in target

    @cached_property
    def prompt_fields(self) -> list[str]:
        """Fields that the prompt names; none if a function makes it."""
        template = self.text or self.task.config.doc_to_text
        if not isinstance(template, str):
            return []
        return [template] if template in self.task.features else sorted(fields_of(template)[0])

    @cached_property
    def _target_is_of_row(self) -> bool:
        """True if the metric compares a text with a field of the row, not with a constant."""
        task, template = self.task, self.target or self.task.config.doc_to_target
        if task.config.process_results is not None or not isinstance(template, str):
            return False
        of_row = template in task.features or bool(fields_of(template)[0])
        return of_row and task.OUTPUT_TYPE in ("generate_until", "loglikelihood")


def _check(rows: Iterable[Any], templates: _Templates, data: TaskData, place: str) -> None:
    fields, of_whole_column = data.fields, None  # fields have no nulls, inside of lists either
    mark, unmarked, is_marked = _mark(data), None, False
    kinds: dict[str, str] = {}
    for index, row in enumerate(rows):
        named = f"{data.task.name}: row {index + 1} of {place}"
        try:
            nulls = (field for field in fields if _has_null(row.get(field)))
            field = next(nulls, None)
            problem = (
                templates.problem(row) if field is None else f"a null or NaN in its field {field!r}"
            )
            problem = problem or _other_kind(row, templates.prompt_fields, kinds)
            lacks_mark = mark is not None and templates.lacks_mark(row, mark)
        except Exception as error:  # of templates and functions of the task: nothing in common
            word = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            problem, lacks_mark = f"the task cannot read it ({word})", False
        if problem is not None:
            error = DataError(f"{named}: {problem}")
            if not _is_whole_float(templates.task, row):
                raise error
            of_whole_column = of_whole_column or error
        is_marked = is_marked or not lacks_mark
        unmarked = unmarked or (named if lacks_mark else None)
    if of_whole_column is not None:
        raise of_whole_column
    if unmarked is not None and is_marked:
        raise DataError(
            f"{unmarked}: its answer has no {mark!r}, after which the result is read in other rows"
        )


def _other_kind(row: Any, fields: Iterable[str], kinds: dict[str, str]) -> str | None:
    """Return that a field is a text where it was a list, or the like; write down what it is."""
    for field in fields:
        kind = _KINDS.get(type(row.get(field)))
        if kind is not None and kinds.setdefault(field, kind) != kind:
            return f"its field {field!r} is {kind}, and in the rows before it {kinds[field]}"
    return None


def _mark(data: TaskData) -> str | None:
    """Return the mark in an answer, such as "#### ", before which the metric reads nothing."""
    metrics = data.task.settings.get("metric_list") or []
    ignored = (one for metric in metrics for one in metric.get("regexes_to_ignore") or [])
    found = (re.fullmatch(r"\(\?s\)\.\*([\w# ]+)", one) for one in ignored)
    return next((one[1] for one in found if one), None)


def _is_whole_float(task: Any, row: Any) -> bool:
    """Return whether the answer of a row is 1.0 or the like, because that of another row is 0.5."""
    try:
        answer = task.doc_to_target(row)
    except Exception:  # as in check_rows
        return False
    return isinstance(answer, float) and answer.is_integer()


def _has_null(value: Any) -> bool:
    """Return whether a value is NaN, or a list, or an object in it, has a null or NaN.

    A prompt would say "nan" or "None".
    """
    if isinstance(value, float):
        return value != value
    if isinstance(value, dict):
        return any(map(_has_null, value.values()))
    if isinstance(value, list | tuple):
        return any(one is None or _has_null(one) for one in value)
    return False
