"""Verification of datasets: for a run, a sample first and the whole beside it; else the whole."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable
from contextlib import suppress

from graphtrain.config.schema import Data, is_streamed
from graphtrain.data.indexed.verify import digest_problem, unverified, verify_sample
from graphtrain.errors import DataError

_LOW_PRIORITY = 19  # of nice


def verify_whole(data: Data, names: Iterable[str]) -> None:
    """Verify all files of datasets against their descriptions, before they are read.

    Args:
        data: Settings of the data.
        names: The datasets among these. One without digests is only warned of.

    Raises:
        DataError: a file is not the one that was prepared, or cannot be read; names it.
    """
    for prefix in _prefixes(data, names):
        _warn_if_unverified(prefix)
        try:
            problem = digest_problem(prefix)
        except OSError as error:
            raise DataError(
                f"{error.filename}: {error.strerror}; prepare the dataset again"
            ) from None
        if problem is not None:
            raise DataError(problem)


class DataCheck:
    """Verification of all files of the datasets against their descriptions, in a thread.

    Datasets without a description, as those of Megatron-LM, have no digests.
    """

    def __init__(self, data: Data) -> None:
        """Verify a sample of the blocks of each dataset.

        Raises:
            DataError: a dataset differs from its description; names the file.
        """
        self._prefixes = _prefixes(data, data.datasets)
        for prefix in self._prefixes:
            verify_sample(prefix)
            _warn_if_unverified(prefix)
        self._problem: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._verify, name="data check", daemon=True)

    def __enter__(self) -> DataCheck:
        """Start to verify the whole of each dataset in the background."""
        self._thread.start()
        return self

    def raise_if_damaged(self) -> None:
        """Raise if a difference was found so far.

        Raises:
            DataError: a file is not the one that was prepared; names it.
        """
        if self._problem is not None:
            raise DataError(self._problem)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Stop; warn if a run ends well before its data is verified."""
        self._stopping.set()
        is_unfinished = self._thread.is_alive()
        self._thread.join()
        if is_unfinished and error is None:
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


def _prefixes(data: Data, names: Iterable[str]) -> list[str]:
    """Return those of the datasets that are local files, each once.

    Code of the user is identified by its digest alone, and of a streamed dataset every block is
    verified when it is read.
    """
    code = {one.reference for one in data.user_code}
    return [name for name in dict.fromkeys(names) if name not in code and not is_streamed(name)]


def _warn_if_unverified(prefix: str) -> None:
    if without := unverified(prefix):
        warnings.warn(f"{without}; damage to it is not noticed", stacklevel=3)
