"""scoped: set a context variable for the duration of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextmanager
def set_context_variable(variable: ContextVar[Value], value: Value) -> Iterator[Value]:
    """Set a context variable inside the block; restore its previous value afterwards."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
