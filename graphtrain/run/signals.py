"""Handling of SIGTERM and Ctrl-C as requests to finish the step, save a checkpoint and stop.

An evaluation is given up; a resumed run repeats it.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lowering.xla import distributed
from lowering.xla.stop_agreement import StopAgreement

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Request to stop: the signal that was received, or None."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def should_stop(self) -> bool:
        """Return whether the run stops here. The result is the same on every rank.

        Every rank asks at the same places: after each step and before each batch of an evaluation.
        """
        return self.signal is not None


class DistributedStopRequest(StopRequest):
    """Request to stop that all processes share: a signal to one stops all at the same place."""

    def __init__(self) -> None:
        super().__init__()
        self.agreement = StopAgreement()

    def should_stop(self) -> bool:
        if self.signal is None and self.agreement.is_reached():
            self.signal = signal.SIGTERM
        return self.signal is not None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Yield the stop request that the first SIGTERM or Ctrl-C sets.

    In a single process, a second signal ends the process as usual. A run in a thread other than the
    main one, which alone may handle signals, leaves them to the program around it.
    """
    if distributed.count() > 1:
        distributed_request = DistributedStopRequest()
        with _sigint_as_sigterm(), distributed_request.agreement.exclusive():
            yield distributed_request
        return
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous_handlers = {signum: signal.getsignal(signum) for signum in _SIGNALS}

    def note(signum: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(signum)
        restore()

    def restore() -> None:
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)

    for signum in _SIGNALS:
        signal.signal(signum, note)
    try:
        yield request
    finally:
        restore()


@contextmanager
def _sigint_as_sigterm() -> Iterator[None]:
    """Convert Ctrl-C to SIGTERM, which JAX's preemption service forwards to the other processes."""
    previous_handler = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda signum, frame: os.kill(os.getpid(), signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
