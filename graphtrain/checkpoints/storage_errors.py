"""Errors of Orbax and TensorStore in the words of graphtrain."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphtrain.checkpoints import private_orbax
from graphtrain.errors import TrainingError


@contextmanager
def checkpoint_errors(path: Path, what: str) -> Iterator[None]:
    """Convert errors of TensorStore and Orbax into TrainingError: "`path` cannot be `what`".

    Not the error of a rank that waited for another one, which is lost.
    """
    try:
        yield
    except private_orbax.STORAGE_ERRORS as error:
        if private_orbax.caused_by_lost_peer(error):
            raise
        raise TrainingError(f"{path} cannot be {what} ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    """Return the first line of an error; only the system's words if TensorStore cites them."""
    first = str(error).partition("\n")[0]
    cited = re.search(r": ([^:]+) \[os_error_code=", first)
    return cited[1] if cited else first
