"""Cleaning hooks: functions of the user's, named MODULE:FUNCTION, that text passes through.

A hook takes the text of a document and returns what is kept of it; None or "" drops the document.
"""

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import cast

from graphtrain.errors import DataError

Hook = Callable[[str], str | None]


@lru_cache
def load_hook(name: str) -> Hook:
    """The function called MODULE:FUNCTION; modules in the current directory are found too.

    Raises:
        DataError: there is no such module or function.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise DataError(f"--clean {name}: give MODULE:FUNCTION, as in cleaning:without_markup")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        hook = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise DataError(f"--clean {name}: {error}") from None
    if not callable(hook):
        raise DataError(f"--clean {name}: is {type(hook).__name__}, not a function")
    return cast(Hook, hook)


def hook_digest(name: str) -> str:
    """The digest of a hook's name and of the file it is in: edited, it may keep other text."""
    hook = load_hook(name)
    try:
        file = inspect.getsourcefile(inspect.unwrap(hook))
    except TypeError:
        file = None  # built in: its name has to do
    source = Path(file).read_bytes() if file else b""
    return f"{name} {hashlib.sha256(source).hexdigest()}"


def clean(text: str, hooks: Sequence[str], place: str) -> str:
    """Text as the hooks leave it, one after another.

    Raises:
        DataError: a hook fails or returns something else; names it and the place of the text.
    """
    for name in hooks:
        try:
            cleaned = load_hook(name)(text)
        except Exception as error:  # the user's code: whatever it is, they need the place
            kind = type(error).__name__
            raise DataError(f"{place}: --clean {name} raised {kind}: {error}") from error
        if not cleaned:
            return ""
        if not isinstance(cleaned, str):
            kind = type(cleaned).__name__
            raise DataError(f"{place}: --clean {name} returned {kind}, neither a string nor None")
        text = cleaned
    return text
