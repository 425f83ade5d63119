"""Errors of object stores: which concern one object, and which are retried for how long."""

from __future__ import annotations

import time
from typing import Any

from graphtrain.errors import CacheError

_MAX_RETRIES, _RETRY_DELAY_SECONDS = (
    20,
    0.1,
)  # retries of interrupted responses, and seconds between them
_MAX_ERROR_LENGTH = 600  # characters of an error message; S3 sends XML, web servers entire pages


class UnusableObject(CacheError):
    """One object of a store cannot be used; others may."""


class TransientStoreError(CacheError):
    """A failure of the store that may be transient."""


class store_errors:
    """Context manager that converts errors of obstore into CacheError.

    With `one_object`, they concern only that object: UnusableObject.
    """

    def __init__(self, url: str, verb: str, name: str, *, one_object: bool = False) -> None:
        self._what = f"cannot {verb} {url.rstrip('/')}/{name}"
        self._one_object = one_object

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, CacheError) or not isinstance(error, Exception):
            return
        message = " ".join(str(error).partition("\n\nDebug source")[0].split())[:_MAX_ERROR_LENGTH]
        is_transient = (
            type(error).__name__ == "GenericError"
        )  # by name, because obstore may not be installed
        other_error = TransientStoreError if is_transient else CacheError
        raise (UnusableObject if self._one_object else other_error)(
            f"{self._what}: {message}"
        ) from error


class RetryLimit:
    """Retry limit for responses that break off; obstore retries only before a response begins.

    The error of an interrupted listing equals that of a refused one, so the number of retries is
    limited as well as the time.
    """

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._tries = 0

    def reset(self) -> None:
        """Reset the number of retries after progress."""
        self._tries = 0

    def extend(self, seconds: float) -> None:
        """Allow so many seconds from now, after progress; the number of retries stays."""
        self._until = time.monotonic() + seconds

    def wait_or_raise(self, error: Exception) -> None:
        """Wait before the next attempt, or raise the error if the limit is reached."""
        self._tries += 1
        if self._tries > _MAX_RETRIES or time.monotonic() > self._until:
            raise error
        time.sleep(_RETRY_DELAY_SECONDS)
