"""SIGTERM and Ctrl-C as a request to save and stop, instead of an end in the middle of a step."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lowering.machine import distributed

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Which signal asked to stop, if any."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def is_due(self, step: int) -> bool:
        """Whether the run stops after a step; all of its processes give the same answer."""
        return self.signal is not None


class SharedStop(StopRequest):
    """The same for several processes: a signal to one stops all, after the same step."""

    def is_due(self, step: int) -> bool:
        if distributed.is_stop_agreed(step):
            self.signal = signal.SIGTERM
        return self.signal is not None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """While inside, the first signal is noted and the second ends the process as usual."""
    if distributed.count() > 1:
        with _interrupt_as_termination():
            yield SharedStop()
        return
    request = StopRequest()
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in _SIGNALS:
        signal.signal(number, note)
    try:
        yield request
    finally:
        restore()


@contextmanager
def _interrupt_as_termination() -> Iterator[None]:
    """JAX's service takes SIGTERM and tells the other processes; Ctrl-C becomes one."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
