"""Agreement of all processes on the step at which a signal stops them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from lowering.xla import distributed


class StopAgreement:
    """Agreement of all processes to stop at the same place because one of them received SIGTERM."""

    def __init__(self) -> None:
        self._polls = itertools.count()
        self._manager: Any = None

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hide JAX's preemption service from Orbax, which would ask it with numbers of its own.

        The service compares the number of each question with the agreed one for equality. Numbers
        of two kinds could pass it by, and the signal would be lost.
        """
        state = distributed.service_state()
        self._manager, state.preemption_sync_manager = state.preemption_sync_manager, None
        try:
            yield
        finally:
            state.preemption_sync_manager = self._manager

    def is_reached(self) -> bool:
        """Return whether all processes stop here; each asks at the same places of the run."""
        poll = next(self._polls)
        return self._manager is not None and self._manager.reached_sync_point(poll)
