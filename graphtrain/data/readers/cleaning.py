"""Cleaning hooks: user functions, named MODULE:FUNCTION, that filter or change each text.

A hook is called with the text of a document and returns the cleaned text; None or "" drops the
document.
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
    """Import the function MODULE:FUNCTION, also from the current directory.

    Raises:
        DataError: there is no such module or function.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise DataError(
            f"--clean {name}: give MODULE:FUNCTION, for example cleaning:without_markup"
        )
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
    """Return a digest of a hook's name and source file, which changes when the hook is edited."""
    hook = load_hook(name)
    try:
        file = inspect.getsourcefile(inspect.unwrap(hook))
    except TypeError:
        file = None  # built-in function without a source file: use only its name
    source = Path(file).read_bytes() if file else b""
    return f"{name} {hashlib.sha256(source).hexdigest()}"


def clean(text: str, hooks: Sequence[str], place: str) -> str:
    """Apply the hooks to a text in order; return an empty text if one of them drops it.

    Args:
        text: Text of a document.
        hooks: Names of the hooks, MODULE:FUNCTION.
        place: File and line of the text, for error messages.

    Raises:
        DataError: a hook raises, or returns neither a string nor None; names hook and place.
    """
    for name in hooks:
        try:
            cleaned = load_hook(name)(text)
        except Exception as error:  # user code may raise anything; report where
            kind = type(error).__name__
            raise DataError(f"{place}: --clean {name} raised {kind}: {error}") from error
        if not cleaned:
            return ""
        if not isinstance(cleaned, str):
            kind = type(cleaned).__name__
            raise DataError(f"{place}: --clean {name} returned {kind}, neither a string nor None")
        text = cleaned
    return text
