"""The target that is traced for: what code asks that has a kernel for some machines."""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from lowering.machine.target import Target
from lowering.tracing.context import scoped

_target: ContextVar[Target | None] = ContextVar("target", default=None)


def tracing_for(target: Target) -> AbstractContextManager[Any]:
    """What is traced inside will run on this machine."""
    return scoped(_target, target)


def traced_target() -> Target | None:
    """The machine that is traced for; None while a model runs alone."""
    return _target.get()
