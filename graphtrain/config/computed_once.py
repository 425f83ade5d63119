"""Values that many estimates of a program ask for, each computed once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from graphtrain.config.resolve import ResolvedProgram

Options = ParamSpec("Options")
Result = TypeVar("Result")


def computed_once(
    function: Callable[Concatenate[ResolvedProgram, Options], Result],
) -> Callable[Concatenate[ResolvedProgram, Options], Result]:
    """Keep what a function returns for a program, as long as that program; a program is constant.

    A search, which estimates thousands of programs, takes two thirds of the time.
    """

    @functools.wraps(function)
    def once(program: ResolvedProgram, *given: Options.args, **options: Options.kwargs) -> Result:
        key = (once, given, *options.items())
        if key not in program.computed:
            program.computed[key] = function(program, *given, **options)
        return program.computed[key]

    return once
