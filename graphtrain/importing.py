"""Imports of libraries that offer more than a run takes, and would import it with themselves."""

import importlib
import sys
from types import ModuleType


def import_without(name: str, *others: str) -> ModuleType:
    """Import a library as it is where others, which it can do without, are not installed.

    What has been imported already stays. Nothing else may import the others at the same time.
    """
    hidden = [other for other in others if other not in sys.modules]
    for other in hidden:
        sys.modules[other] = None  # pyright: ignore[reportArgumentType]  # "not found", to import
    try:
        return importlib.import_module(name)
    finally:
        for other in hidden:
            del sys.modules[other]
