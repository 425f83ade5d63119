"""Settings of an evaluation on tasks; imports no lm-eval, which rank 0 alone needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from graphtrain.errors import GraphtrainError

SEED = 1234  # of the choice of examples; that of lm-eval
RANDOM_SEED = 0

Progress = Callable[[str, int, int], None]  # called with kind of request, finished, and all


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Settings of an evaluation on tasks."""

    tasks: tuple[str, ...]  # names of tasks, groups and tags, and files of tasks
    data: Path | None = None  # directory of their data; None: the tasks name files
    limit: int | None = None  # rows of each task; None: all
    fewshot: int | None = None  # examples in a prompt; None: as each task says
    allow_code: bool = False  # run code that the model wrote, confined

    def __post_init__(self) -> None:
        """Check the numbers, which the command checks as its options.

        Raises:
            GraphtrainError: a number is too small, or no integer.
        """
        for name, least in (("limit", 1), ("fewshot", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise GraphtrainError(
                    f"{name} = {value!r}: must be an integer, at least {least}, or None"
                )
