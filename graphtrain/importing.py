"""Import libraries without optional dependencies that a run does not need."""

import importlib
import sys
from types import ModuleType


def import_without(name: str, *others: str) -> ModuleType:
    """Import a library as if some of its optional dependencies were not installed.

    Dependencies that are already imported remain available. No other thread may import them at the
    same time.

    Args:
        name: module to import.
        others: optional dependencies to hide.
    """
    hidden = [other for other in others if other not in sys.modules]
    for other in hidden:
        sys.modules[other] = None  # pyright: ignore[reportArgumentType]  # "not found", to import
    try:
        return importlib.import_module(name)
    finally:
        for other in hidden:
            del sys.modules[other]
