"""Where the time goes until the first step is finished, of a peer and of ours."""

import itertools
import json
import sys
import time
from pathlib import Path


class Marks:
    """What passes between marks; the start of Python itself comes before the first."""

    def __init__(self) -> None:
        self._marks = [("", time.perf_counter(), time.process_time())]

    def mark(self, name: str) -> None:
        self._marks.append((name, time.perf_counter(), time.process_time()))

    def finish(self, loss: float) -> None:
        """Write all into the file that the first argument names; the benchmark waits for it.

        Of each part: seconds of the clock, and processor seconds of all threads.
        """
        parts = {
            now[0]: [round(now[1] - before[1], 3), round(now[2] - before[2], 3)]
            for before, now in itertools.pairwise(self._marks)
        }
        Path(sys.argv[1]).write_text(json.dumps({"loss": loss, "parts": parts}))
