"""Facts that XLA reports only in its compiler log: arrays that the partitioner replicated."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from lowering.xla import private


@contextmanager
def capture_compiler_log() -> Iterator[list[dict[str, str]]]:
    """Capture the compiler log; on exit, fill the list with arrays replicated for resharding.

    The compiler writes to file descriptor 2 directly. The captured log is written to the original
    standard error afterwards.
    """
    replicated: list[dict[str, str]] = []
    sys.stderr.flush()
    with tempfile.TemporaryFile() as log:
        stderr = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            yield replicated
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            log.seek(0)
            text = log.read()
            os.write(2, text)
            replicated += replicated_arrays(text.decode(errors="replace"))


def replicated_arrays(log: str) -> list[dict[str, str]]:
    """Return shape, scope and both shardings of each array replicated by the partitioner, once."""
    reported = list(private.replicated_arrays(log))
    return [array for index, array in enumerate(reported) if array not in reported[:index]]
