"""Verification of a run's datasets: a sample before the first step, the whole beside training."""

from __future__ import annotations

import os
import threading
import warnings
from contextlib import suppress

from graphtrain.config.schema import Data
from graphtrain.data.indexed.verify import digest_problem, unverified, verify_sample
from graphtrain.errors import DataError

_LOW_PRIORITY = 19  # of nice


class DataCheck:
    """Verification of all files of the datasets against their descriptions, in a thread.

    Datasets without a description, as those of Megatron-LM, have no digests.
    """

    def __init__(self, data: Data) -> None:
        """Verify a sample of the blocks of each dataset.

        Raises:
            DataError: a dataset differs from its description; names the file.
        """
        parts = [data.train] if isinstance(data.train, str) else [p.dataset for p in data.train]
        self._prefixes = list(dict.fromkeys([*parts, *filter(None, [data.validation])]))
        for prefix in self._prefixes:
            verify_sample(prefix)
            if without := unverified(prefix):
                warnings.warn(f"{without}; damage to it is not noticed", stacklevel=2)
        self._problem: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._verify, name="data check", daemon=True)

    def start(self) -> None:
        """Start to verify the whole of each dataset in the background."""
        self._thread.start()

    def raise_if_damaged(self) -> None:
        """Raise if a difference was found so far.

        Raises:
            DataError: a file is not the one that was prepared; names it.
        """
        if self._problem is not None:
            raise DataError(self._problem)

    def close(self) -> None:
        """Stop; warn if a run ends before its data is verified."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
            warnings.warn(
                f"the run ended before {', '.join(self._prefixes)} were verified as a whole; "
                "to do it: graphtrain data verify",
                stacklevel=2,
            )

    def _verify(self) -> None:
        with suppress(OSError, AttributeError):  # the priority of this thread, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
        for prefix in self._prefixes:
            try:
                self._problem = digest_problem(prefix, self._stopping.is_set)
            except (OSError, DataError) as error:
                self._problem = f"{prefix}: cannot be verified ({error})"
            if self._problem is not None or self._stopping.is_set():
                return
