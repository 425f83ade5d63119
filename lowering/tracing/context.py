"""scoped: a context variable's value for as long as something is traced."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextmanager
def scoped(variable: ContextVar[Value], value: Value) -> Iterator[Value]:
    """Inside, the variable has this value; behind, the one it had before."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
