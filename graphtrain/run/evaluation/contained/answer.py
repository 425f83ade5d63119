"""Process of an answer: runs a program of a model, and answers calls of its functions.

The process never has the tests. It opens no file once the program runs: what it imports of the
standard library is imported before.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

from .confinement import confine
from .values import CannotCross, decode, encode, receive, send

_MOST_WORDS = 200  # characters of an error's message
_MOST_OF_ERROR = 1 << 16  # characters of its arguments
# Imported by functions of the standard library, and by the compiler for \N{...}.
_IMPORTED_LATE = (
    "_strptime", "contextlib", "encodings.ascii", "encodings.latin_1", "linecache", "tokenize",
    "traceback", "unicodedata", "warnings", "weakref",
)  # fmt: skip
# Modules that do more than define when they are imported.
_NOT_IMPORTED = {
    "__main__",
    "antigravity",
    "idlelib",
    "site",
    "test",
    "tests",
    "this",
    "turtledemo",
}


def main() -> None:
    """Read a program from descriptor 0, run it, and answer what descriptor argv[1] asks."""
    calls, replies = map(int, sys.argv[1:3])
    given = receive(0)
    program = given["program"]
    _import_before(program)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    import io

    sys.stdout = sys.stderr = io.StringIO()
    sys.stdin = io.StringIO()
    sys.argv = [""]
    confine(given["cpu_seconds"], given["memory"], reads_files=False)
    names: dict[str, Any] = {}
    try:
        # Not as __main__: the metric of Hugging Face does not run what a program keeps for that.
        exec(compile(program, "program", "exec"), names)
    except BaseException as error:  # SystemExit and KeyboardInterrupt too
        send(replies, {"failed": _described(error)})
        return
    send(replies, {"ready": True})
    while True:
        send(replies, _reply(receive(calls), names))


def _import_before(program: str) -> None:
    """Import the modules of the standard library that a program names."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.Import):
                _import(*(alias.name for alias in node.names))
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                _import(node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    _import(*_IMPORTED_LATE)


def _import(*names: str) -> None:
    for name in names:
        parts = name.split(".")
        if parts[0] in sys.stdlib_module_names and not _NOT_IMPORTED & set(parts):
            with suppress(Exception):  # the program meets it again
                importlib.import_module(name)


def _reply(asked: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """Return what a name stands for, or what a call of it returns."""
    try:
        found = names[asked["name"]]
        if "arguments" not in asked:
            return _stands_for(found)
        arguments, keywords = decode(asked["arguments"]), decode(asked["keywords"])
        try:
            returned = {"result": encode(found(*arguments, **keywords))}
        except Exception as error:
            returned = _raised(error)
        changed = [*arguments, *keywords.values()]
        return returned | {"arguments": [_content(one) for one in changed]}
    except CannotCross as error:
        return {"failed": f"the function returned {error}, which cannot be passed to the tests"}
    except BaseException as error:
        return _raised(error) | {"arguments": []}


def _raised(error: BaseException) -> dict[str, Any]:
    """Return an exception as the tests are told of it: its classes, and its arguments."""
    if isinstance(error, CannotCross):
        raise error
    given = None
    with suppress(BaseException):  # of the answer's own classes, or recursive
        given = encode(list(error.args))
        given = given if len(str(given)) < _MOST_OF_ERROR else None
    kinds = [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, BaseException)]
    return {"raised": kinds, "message": _described(error), "given": given}


def _stands_for(found: Any) -> dict[str, Any]:
    if isinstance(found, ModuleType):
        return {"module": found.__name__}
    return {"function": True} if callable(found) else {"value": encode(found)}


def _content(argument: Any) -> Any:
    """Return an argument after a call, which may have changed it; None if it cannot change."""
    return encode(argument) if isinstance(argument, list | dict | set | bytearray) else None


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:_MOST_WORDS]!r}"
