"""Where the time of a peer goes, written down when its first step is finished."""

import itertools
import json
import sys
import time
from pathlib import Path


class Marks:
    """Seconds between marks; the start of Python itself comes before the first."""

    def __init__(self) -> None:
        self._marks = [("", time.perf_counter())]

    def mark(self, name: str) -> None:
        self._marks.append((name, time.perf_counter()))

    def finish(self, loss: float) -> None:
        """Write all into the file that the first argument names; the benchmark waits for it."""
        pairs = itertools.pairwise(self._marks)
        parts = {name: round(now - before, 3) for (_, before), (name, now) in pairs}
        Path(sys.argv[1]).write_text(json.dumps({"loss": loss, "parts": parts}))
