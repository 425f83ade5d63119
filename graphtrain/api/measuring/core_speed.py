"""Speed of the cores. A neighbour on the host of a virtual machine takes part of it, unseen.

Two virtual CPUs of different machines may share a core: while the other works, this one takes
half as long again for the same work, and no counter of the system shows it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from lowering.machine import host

_STEPS = 12_000  # of the fixed computation, about a millisecond
_SLOWER = 1.25  # times the least, which the least of three does not reach on a core of its own
_LOOKS = 3
_PROBED = 8  # cores at most
_PAUSE = 0.05  # seconds
Result = TypeVar("Result")


@dataclass
class CoreSpeed:
    """Seconds of a fixed computation on each core, beside the least that it ever took there.

    Attributes:
        least: Least seconds on each CPU; cores of one machine may differ.
        patience: Seconds that the current measurement still waits for the full speed.
        granted: Seconds that each measurement may wait.
        runs: Runs that took place.
        slow: Those of them in which a core was slower.
    """

    least: dict[int, float] = field(default_factory=dict)
    patience: float = 0.0
    granted: float = 0.0
    runs: int = 0
    slow: int = 0

    @property
    def slow_share(self) -> float:
        """Share of the runs in which a core was slower."""
        return self.slow / self.runs if self.runs else 0.0

    def is_full(self) -> bool:
        """Return whether every core takes about the least time that it has taken."""
        return all([self._is_full(cpu) for cpu in sorted(host.usable_cpus())[:_PROBED]])

    def run(self, function: Callable[[], Result]) -> tuple[Result, bool]:
        """Return a function's result, and whether the cores had their full speed meanwhile.

        A run in which they had not is repeated as long as there is patience.
        """
        while True:
            full = self._wait()
            began = time.monotonic()
            result = function()
            full = full and self.is_full()
            if full or self.patience <= 0:
                self.runs += 1
                self.slow += not full
                return result, full
            self.patience -= time.monotonic() - began

    def _wait(self) -> bool:
        """Wait until the cores have their full speed, as long as there is patience; return it."""
        while not (full := self.is_full()) and self.patience > 0:
            time.sleep(_PAUSE)
            self.patience -= _PAUSE
        return full

    def watch(self, seconds: float) -> None:
        """Look for the least times for some seconds."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.is_full()

    def _is_full(self, cpu: int) -> bool:
        """Return whether one of three looks at a CPU finds it about as fast as it ever was."""
        for _ in range(_LOOKS):
            seconds = _on(cpu)
            self.least[cpu] = min(seconds, self.least.get(cpu, seconds))
            if seconds <= _SLOWER * self.least[cpu]:
                return True
        return False


def _on(cpu: int) -> float:
    """Return the processor seconds of the computation in this thread, on one CPU."""
    allowed = host.usable_cpus()
    if not hasattr(os, "sched_setaffinity"):
        return _computation()
    os.sched_setaffinity(0, {cpu})  # of this thread alone
    try:
        return _computation()
    finally:
        os.sched_setaffinity(0, allowed)


def _computation() -> float:
    began, total = time.thread_time(), 0
    for index in range(_STEPS):
        total += index * index
    return time.thread_time() - began
