"""Lines of a model between its named activations, read from the traced program.

An activation is made by the operations since the named ones before it. Its gradient is made by
those after it, until the next named ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from lowering.tracing.recording import MARK
from lowering.tracing.source_lines import model_line

_LOOP = "\0"  # in place of a name: what the iteration before passed on
Lines = dict[str, None]  # an ordered set


@dataclass(frozen=True)
class RecordedLines:
    """Lines of the model by the name of an activation, in the order of execution."""

    making: dict[str, Lines] = field(default_factory=dict)
    using: dict[str, Lines] = field(default_factory=dict)


@dataclass
class _Value:
    """Origin of a value: named activations, and the lines since them."""

    names: dict[str, None] = field(default_factory=dict)  # of the activations that it is made from
    lines: Lines = field(default_factory=dict)


def recorded_lines(program: ClosedJaxpr) -> RecordedLines:
    """Return the lines of a program that was traced inside `recording(marks=True)`."""
    found = RecordedLines()
    _walk(program.jaxpr, [_Value() for _ in program.jaxpr.invars], found)
    return found


def _walk(jaxpr: Jaxpr, inputs: Sequence[_Value], found: RecordedLines) -> list[_Value]:
    """Return the values of a program's outputs, and add what is found inside."""
    values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))

    def value_of(variable: Any) -> _Value:
        return _Value() if isinstance(variable, Literal) else values.get(variable, _Value())

    for equation in jaxpr.eqns:
        operands = [value_of(variable) for variable in equation.invars]
        name = str(equation.params.get("name", ""))
        if equation.primitive.name == "name" and name.startswith(MARK):
            name = name.removeprefix(MARK)
            found.making.setdefault(name, {}).update(operands[0].lines)
            results = [_Value({name: None})]
        elif (inner := _marked_program(equation)) is not None:
            results = _walk_inside(equation, inner, operands, found)
        else:
            new = dict.fromkeys(filter(None, _lines_of(equation)))
            names = _union(operand.names for operand in operands)
            for used in names:
                found.using.setdefault(used, {}).update(new)
            lines = _union(operand.lines for operand in operands) | new
            results = [_Value(names, lines) for _ in equation.outvars]
        values.update(zip(equation.outvars, results, strict=True))
    return [value_of(variable) for variable in jaxpr.outvars]


def _walk_inside(
    equation: Any, inner: Jaxpr, operands: list[_Value], found: RecordedLines
) -> list[_Value]:
    """Return the results of a loop or a call whose program names activations."""
    if len(operands) != len(inner.invars):
        operands = [_Value() for _ in inner.invars]
    if equation.primitive.name != "scan":
        results = _walk(inner, operands, found)
    else:
        first, count = _carried(equation.params)
        carried = range(first, first + count)
        operands = [
            _Value(one.names | {_LOOP: None}, one.lines) if index in carried else one
            for index, one in enumerate(operands)
        ]
        results = _walk(inner, operands, found)
        entered = found.using.pop(_LOOP, {})
        for result in results[:count]:
            for name in result.names:
                found.using.setdefault(name, {}).update(entered)
    unlooped = [
        _Value({name: None for name in one.names if name != _LOOP}, one.lines) for one in results
    ]
    count = len(equation.outvars)
    return unlooped if len(unlooped) == count else [_Value() for _ in range(count)]


def _carried(params: dict[str, Any]) -> tuple[int, int]:
    """Return the index of the first carried operand of a scan, and how many are carried."""
    if "num_consts" in params:  # jax 0.10
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


def _marked_program(equation: Any) -> Jaxpr | None:
    """Return the program inside a loop or a call, if it names activations."""
    return next((inner for inner in _programs(equation) if _is_marked(inner)), None)


def _is_marked(jaxpr: Jaxpr) -> bool:
    return any(
        (one.primitive.name == "name" and str(one.params["name"]).startswith(MARK))
        or any(map(_is_marked, _programs(one)))
        for one in jaxpr.eqns
    )


def _programs(equation: Any) -> Iterable[Jaxpr]:
    for parameter in equation.params.values():
        for one in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if isinstance(one, ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, Jaxpr):
                yield one


def _lines_of(equation: Any) -> Iterable[str]:
    """Yield the lines of an operation and of those inside it."""
    traceback = equation.source_info.traceback
    if traceback is not None:
        yield model_line((frame.file_name, frame.line_num) for frame in traceback.frames)
    for inner in _programs(equation):
        for one in inner.eqns:
            yield from _lines_of(one)


def _union(sets: Iterable[dict[str, None]]) -> dict[str, None]:
    return {item: None for one in sets for item in one}
