"""Limits of time and memory for chat templates, which are programs of whoever made the model.

Jinja's sandbox keeps a template from Python, but `'a' * 10**9`, nested loops and filters such as
`center` take as much time and memory as they like. Here every operation whose cost a template can
choose is charged to a budget before it runs. The cost is a count of bytes and steps, not a time, so
that the same template and conversation always give the same result. An operation costs the product
of the sizes of its arguments, which no function of templates exceeds.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from inspect import unwrap
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE_CHARACTERS = 1 << 20
_BUDGET = 1 << 26  # bytes; about a second
_BUDGET_PER_CHARACTER = 256  # of the conversation
_STEP = 256  # bytes that take as long as one call or one iteration of a loop
_CHARGED, _COUNTED = "charged by limits", "counted by limits"  # filters; no template can name them
_FREE = ("default", "d")  # filters that take any value and compute nothing
_QUADRATIC = ("sum", "urlize", "wordwrap")


class TemplateLimitError(ValueError):
    """A template takes more time or memory than any chat template needs."""


class _Budget:
    def __init__(self, size: int) -> None:
        self.left = size

    def spend(self, cost: int) -> None:
        self.left -= cost
        if self.left < 0:
            raise TemplateLimitError("it builds too much text, or does not end in time")


_budget: ContextVar[_Budget] = ContextVar("budget of the template that is rendered")


@contextmanager
def limits(*inputs: Any) -> Iterator[None]:
    """Limit what templates compile and render in this block.

    Args:
        inputs: The template and its variables; the limit grows with their size.
    """
    token = _budget.set(_Budget(sys.maxsize))
    try:
        characters = sum(map(_size, inputs))
        _budget.set(_Budget(_BUDGET + _BUDGET_PER_CHARACTER * characters))
        yield
    finally:
        _budget.reset(token)


def _spend(cost: int) -> None:
    _budget.get().spend(_STEP + cost)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Sandbox whose templates are charged for what they do; use it inside `limits`."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.code_generator_class = _ChargingGenerator
        del self.globals["lipsum"]  # takes long, and no conversation needs it

    def limit_filters(self) -> None:
        """Charge all filters and tests that are registered now."""
        for table in (self.filters, self.tests):
            for name, function in table.items():
                table[name] = _limited(name, function)
        self.filters[_CHARGED] = _charged
        self.filters[_COUNTED] = _counted

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the output of a template, macro or block."""
        kept = []
        for part in parts:
            _spend(len(part))
            kept.append(part)
        return "".join(kept)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str | bytes):
            _spend(_format_cost(left, (right,)))
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            factor = right if operator == "**" else right.bit_length()
            _spend(left.bit_length() * abs(factor) // 8)
        elif operator == "+":
            _spend(_size(left) + _size(right))
        else:
            _spend(_product((left, right), True))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, /, *args: Any, **options: Any) -> Any:
        owner = getattr(unwrap(called), "__self__", None)  # the sandbox wraps str.format
        values = [*args, *options.values()]
        if isinstance(called, Macro):
            _spend(0)
        elif isinstance(owner, str) and unwrap(called).__name__ in ("format", "format_map"):
            _spend(_format_cost(owner, values))
        else:
            _spend(_product(values, True) * max(1, _size(owner)))
        return super().call(context, called, *args, **options)


class _ChargingGenerator(CodeGenerator):
    """Compiler that charges for what no function does: loops, lists, slices and output."""

    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        super().visit_Template(_Charges(self.environment).visit(node), frame)


class _Charges(NodeTransformer):
    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def generic_visit(self, node: nodes.Node, *args: Any, **options: Any) -> nodes.Node:
        super().generic_visit(node, *args, **options)
        match node:
            case nodes.For():
                node.iter = self._filtered(node.iter, _COUNTED)
            case nodes.Compare():
                for side in (node, *node.ops):
                    side.expr = self._filtered(side.expr, _CHARGED)
            case nodes.Getitem(arg=nodes.Slice()):
                node.node = self._filtered(node.node, _CHARGED)
            case nodes.Concat():
                node.nodes = [self._filtered(inner, _CHARGED) for inner in node.nodes]
            case nodes.Output():
                node.nodes = [
                    inner
                    if isinstance(inner, nodes.TemplateData)
                    else self._filtered(inner, _CHARGED)
                    for inner in node.nodes
                ]
            case nodes.List() | nodes.Dict() | nodes.Tuple(ctx="load"):
                return self._filtered(node, _CHARGED)  # a list of a list twice, of that twice, ...
        return node

    def _filtered(self, value: Any, name: str) -> nodes.Filter:
        filtered = nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)
        filtered.environment = self._environment
        return filtered


def _charged(value: Any) -> Any:
    _spend(_size(value))
    return value


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _spend(0)
        yield value


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or test that is charged before it runs."""

    @wraps(function)  # keeps the mark that Jinja passes the context as first argument
    def limited(*args: Any, **options: Any) -> Any:
        values = [*args, *options.values()]
        if name == "format":
            _spend(_format_cost(str(values[0]), values[1:]))
        elif name not in _FREE:
            cost = _product(values, any(_size(value) for value in values))
            _spend(cost * cost if name in _QUADRATIC else cost)
        return function(*args, **options)

    return limited


def _product(values: Iterable[Any], count_numbers: bool) -> int:
    cost = 1
    for value in values:
        if isinstance(value, int):
            cost *= max(1, abs(value)) if count_numbers else 1
        else:
            cost *= max(1, _size(value))
    return cost


def _format_cost(pattern: str | bytes, values: Iterable[Any]) -> int:
    """Return the cost of a format string: each field may repeat a value, or be as wide as told."""
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    widths = sum(map(int, re.findall(r"\d+", text)))
    if "*" in text or re.search(r"\{[^}]*\{", text):  # the width is a value
        widths += sum(map(_largest, values))
    return len(text) + widths + (1 + text.count("{") + text.count("%")) * sum(map(_size, values))


def _largest(value: Any) -> int:
    if isinstance(value, int):
        return abs(value)
    return max(map(_largest, value), default=0) if isinstance(value, tuple | list) else 0


def _size(value: Any) -> int:
    """Return the bytes and elements in a value, in depth; 0 for a value without a size."""
    if isinstance(value, str | bytes | range):
        return len(value)
    if isinstance(value, Namespace):
        raise TemplateLimitError("it uses a namespace as a value")
    if isinstance(value, Mapping):
        inner: Iterable[Any] = (part for item in value.items() for part in item)
    elif isinstance(value, list | tuple | set | frozenset):
        inner = value
    else:
        return 0
    size = 0
    for part in inner:
        _budget.get().spend(_STEP // 4)
        size += 1 + _size(part)
    return size
