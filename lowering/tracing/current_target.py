"""Target that code is being traced for, read by code with platform-specific kernels."""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from lowering.machine.target import Target
from lowering.tracing.context import set_context_variable

_target: ContextVar[Target | None] = ContextVar("target", default=None)


def trace_for_target(target: Target) -> AbstractContextManager[Any]:
    """Return a context in which traced_target() is this target."""
    return set_context_variable(_target, target)


def traced_target() -> Target | None:
    """Return the target being traced for; None outside trace_for_target()."""
    return _target.get()
