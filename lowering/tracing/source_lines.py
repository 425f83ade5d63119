"""Which lines of Python a program comes from: those of the model, not of what it calls."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_OURS = ("graphtrain/", "lowering/", "sharding_rules/")
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3")
# Code called from everywhere: the line that called it says more.
_ROUNDABOUT = (
    "lowering/",
    "graphtrain/models/lora/layers.py",
    "graphtrain/models/matmul.py",
    "graphtrain/models/projection.py",
)


def line_of(stack: Iterable[tuple[str, int]]) -> str:
    """The line of a model's code that a stack, innermost first, tells of: "examples/net.py:18".

    Empty where all of the stack is in libraries.
    """
    own = [(path, line) for file, line in stack if (path := _own(file))]
    telling = [(path, line) for path, line in own if not path.startswith(_ROUNDABOUT)]
    return next((f"{path}:{line}" for path, line in telling or own), "")


def current_line() -> str:
    """The line of a model's code that is running now."""

    def stack() -> Iterable[tuple[str, int]]:
        frame = sys._getframe(2)
        while frame is not None:
            yield frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back

    return line_of(stack())


@functools.cache
def _own(file: str) -> str | None:
    """A file of ours or the user's, from the root of the source tree; None for a library's."""
    path = Path(file)
    relative = path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else file
    if relative.startswith(_OURS):
        return relative
    return None if any(part in file for part in _LIBRARIES) or file[:1] == "<" else relative
