"""Source line of the model that created an operation, from a Python stack."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("graphtrain/", "lowering/", "sharding_rules/")
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3")
# Code with many callers: the calling line is reported instead.
_SHARED_HELPERS = (
    "lowering/",
    "graphtrain/models/lora/layers.py",
    "graphtrain/models/matmul.py",
    "graphtrain/models/projection.py",
)


def model_line(stack: Iterable[tuple[str, int]]) -> str:
    """Return the innermost line of model code in a stack, for example "examples/net.py:18".

    Args:
        stack: file and line of each frame, innermost first.

    Returns:
        An empty string if all frames are in libraries.
    """
    own = [(path, line) for file, line in stack if (path := _own(file))]
    telling = [(path, line) for path, line in own if not path.startswith(_SHARED_HELPERS)]
    return next((f"{path}:{line}" for path, line in telling or own), "")


def current_line() -> str:
    """Return the line of model code that is being executed."""

    def stack() -> Iterable[tuple[str, int]]:
        frame = sys._getframe(2)
        while frame is not None:
            yield frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back

    return model_line(stack())


@functools.cache
def _own(file: str) -> str | None:
    """Return the path of a file of graphtrain or of the user; None for a library.

    Files of graphtrain are relative to the root of the source tree.
    """
    path = Path(file)
    relative = path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else file
    if relative.startswith(_PACKAGES):
        return relative
    return None if any(part in file for part in _LIBRARIES) or file[:1] == "<" else relative
