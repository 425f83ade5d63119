"""Callbacks: functions of the user that a run calls with its metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Protocol

from graphtrain.errors import CallbackError

if TYPE_CHECKING:
    from pathlib import Path

    from graphtrain.run.events import Metrics, RunStart, RunSummary


class Callback(Protocol):
    """Observer of a run: a subclass, or any object with some of these methods.

    They are called on rank 0, in the thread of the training loop, while the devices compute the
    next step. An exception ends the run with CallbackError; checkpoints stay.
    """

    def on_run_start(self, start: RunStart) -> None:
        """Note that the first step has been started, when the run can no longer be refused."""

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Note the metrics of a step: loss, grad_norm, learning_rate, tokens_per_second, ..."""

    def on_evaluate(self, step: int, metrics: Metrics) -> None:
        """Note the metrics of an evaluation: validation_loss, or scores on tasks by name."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Note that the checkpoint of a step is complete; not those on disks of the hosts.

        Where hosts share no disk, it is one that is to be uploaded, and `path` the part of rank 0.
        """

    def on_run_end(self, summary: RunSummary) -> None:
        """Note that the run is complete, or was stopped by a signal."""


Notify = Callable[..., None]  # called with the name of an event and its arguments
EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Refuse a callback with a misspelt method, which would never be called.

    Raises:
        CallbackError: a callback has a method on_* that is no event, or none that is.
    """
    if not isinstance(callbacks, Sequence):
        raise CallbackError(f"callbacks = {_name(callbacks)}: must be a list; put it into [ ]")
    for callback in callbacks:
        methods = [name for name in dir(callback) if name.startswith("on_")]
        for name in methods:
            if name not in EVENTS:
                close = get_close_matches(name, EVENTS, n=1)
                hint = f"did you mean {close[0]}?" if close else f"events: {', '.join(EVENTS)}"
                raise CallbackError(f"callback {_name(callback)}: no event {name}; {hint}")
        if not methods:
            raise CallbackError(
                f"callback {_name(callback)} has none of the methods {', '.join(EVENTS)}"
            )


def notify(callbacks: Sequence[object], event: str, *arguments: Any) -> None:
    """Call the method of an event on every callback that has it.

    Raises:
        CallbackError: a callback raised an exception.
    """
    for callback in callbacks:
        method = getattr(callback, event, None)
        if method is None:
            continue
        try:
            method(*arguments)
        except Exception as error:
            raise CallbackError(
                f"callback {_name(callback)}.{event} raised {type(error).__name__}: {error}"
            ) from error


def _name(callback: object) -> str:
    kind = callback if isinstance(callback, type) else type(callback)
    return getattr(callback, "__name__", kind.__qualname__)
