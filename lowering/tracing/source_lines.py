"""Source line of the model that created an operation, from a Python stack.

Lines of libraries and of `lowering` are not reported. A module with many callers, for example a
matrix product, declares itself with `report_callers(__file__)`: its callers are reported instead.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_LOWERING = "lowering/"
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3")
_packages = [_LOWERING]  # reported even if they are installed as libraries
_helpers: set[str] = set()  # files that report their callers


def report_package(name: str) -> None:
    """Report lines of a top-level package beside `lowering`, also where both are installed."""
    _packages.append(f"{name}/")
    _own.cache_clear()


def report_callers(file: str) -> None:
    """Report the lines that call a file instead of its own; pass `__file__` at its import."""
    _helpers.add(_shown(file))


def model_line(stack: Iterable[tuple[str, int]]) -> str:
    """Return the innermost line of model code in a stack, for example "examples/net.py:18".

    Args:
        stack: file and line of each frame, innermost first.

    Returns:
        An empty string if all frames are in libraries.
    """
    model_frames = [(path, line) for file, line in stack if (path := _own(file))]
    direct_frames = [(path, line) for path, line in model_frames if not _is_helper(path)]
    return next((f"{path}:{line}" for path, line in direct_frames or model_frames), "")


def current_line() -> str:
    """Return the line of model code that is being executed."""

    def stack() -> Iterable[tuple[str, int]]:
        frame = sys._getframe(2)
        while frame is not None:
            yield frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back

    return model_line(stack())


def _is_helper(path: str) -> bool:
    return path.startswith(_LOWERING) or path in _helpers


@functools.cache
def _own(file: str) -> str | None:
    """Return the path of a file of our packages or of the user; None for a library."""
    path = _shown(file)
    if path.startswith(tuple(_packages)):
        return path
    return None if any(library in file for library in _LIBRARIES) or file[:1] == "<" else path


def _shown(file: str) -> str:
    """Return the path of a file, relative to the root of the source tree where it is inside."""
    path = Path(file)
    return path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else file
