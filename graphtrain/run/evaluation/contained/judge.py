"""Process of the tests: runs them with functions that are called in the process of the answer.

The tests' own names are theirs: of an answer they see only names that nothing else defines. Helper
functions of a task's prompt run here, as the task has them.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import symtable
import sys
from collections.abc import Callable
from typing import Any

from .confinement import confine
from .values import CannotCross, decode, encode, receive, replace_content, send

# With these, tests say what is right.
_NEVER_OF_ANSWER = {
    "AssertionError", "Exception", "abs", "all", "any", "bool", "dict", "float", "int",
    "isinstance", "len", "list", "print", "range", "round", "set", "sorted", "str", "tuple", "type",
    "zip",
}  # fmt: skip


class _Failed(Exception):
    """The answer fails, for a reason that is not of the tests."""


def main() -> None:
    """Read tests from descriptor 0, run them, and write the result to descriptor 1."""
    calls, replies = map(int, sys.argv[1:3])
    given = receive(0)
    confine(given["cpu_seconds"], given["memory"], reads_files=True)
    try:
        _Judge(calls, replies).run(given["test"], given["prompt"])
        report = "passed"
    except _Failed as error:
        report = f"failed: {error}"
    except EOFError:
        report = "timed out, or ended without a report"
    except BaseException as error:
        report = f"failed: {type(error).__name__}: {str(error)[:200]!r}"
    os.write(1, report.encode(errors="replace"))


class _Judge:
    """Tests, and the pipes to the process of the answer."""

    def __init__(self, calls: int, replies: int) -> None:
        self._calls, self._replies = calls, replies

    def run(self, test: str, prompt: str) -> None:
        """Run tests; an exception that they raise is theirs.

        Raises:
            _Failed: the program failed, or what it returned cannot be judged.
            EOFError: its process ended.
        """
        self._receive()  # that the program has run
        names: dict[str, Any] = {}
        trusted = _names_of_prompt(prompt)
        for name in sorted(_names_of_answer(test)):
            if name in trusted:
                names[name] = trusted[name]
            elif (found := self._ask({"name": name})).get("raised") is None:
                names[name] = self._value(name, found)
        exec(compile(test, "tests", "exec"), names)

    def _value(self, name: str, found: dict[str, Any]) -> Any:
        """Return what a name of the program stands for."""
        if "function" in found:
            return self._function(name)
        if "module" in found:
            if found["module"] != name or name not in sys.stdlib_module_names:
                raise _Failed(f"the tests use {name}, a module under another name")
            return importlib.import_module(name)
        return decode(found["value"])

    def _function(self, name: str) -> Callable[..., Any]:
        def function(*arguments: Any, **keywords: Any) -> Any:
            try:
                asked = {"arguments": encode(arguments), "keywords": encode(keywords)}
            except CannotCross as error:
                raise _Failed(f"the tests pass {error}, which no other process can have") from None
            reply = self._ask({"name": name} | asked)
            changed = [*arguments, *keywords.values()]
            for old, new in zip(changed, reply["arguments"], strict="raised" not in reply):
                if new is not None:
                    _replace(old, decode(new))
            if "raised" in reply:
                raise _exception(reply)
            return decode(reply["result"])

        function.__name__ = name
        return function

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            send(self._calls, message)
        except BrokenPipeError:
            raise EOFError from None
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        try:
            reply = receive(self._replies)
        except CannotCross as error:
            raise _Failed(f"the answer sent {error}") from None
        if not isinstance(reply, dict):
            raise _Failed("the answer sent no reply")
        if "failed" in reply:
            raise _Failed(str(reply["failed"])[:400])
        return reply


def _replace(old: Any, new: Any) -> None:
    if type(old) is not type(new):
        raise _Failed("the answer sent an argument of another type")
    replace_content(old, new)


def _exception(reply: dict[str, Any]) -> BaseException:
    """Return an exception of the answer: of the nearest of its classes that is built in."""
    names = [str(name) for name in reply["raised"]]
    kind = next((getattr(builtins, name) for name in names if hasattr(builtins, name)), None)
    message = str(reply.get("message"))[:400]
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            given = reply.get("given")
            return kind(message) if given is None else kind(*decode(given))
        except (TypeError, CannotCross):  # UnicodeDecodeError and the like take other arguments
            return Exception(message)
    return _Failed(message)


def _names_of_prompt(prompt: str) -> dict[str, Any]:
    """Return the names that a task's prompt defines, without the function that it asks for."""
    try:
        tree = ast.parse(prompt)
    except SyntaxError:  # the prompt is no program by itself
        return {}
    names: dict[str, Any] = {}
    exec(compile(tree, "prompt", "exec"), names)
    asked = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)][-1:]
    return {name: value for name, value in names.items() if name not in asked}


def _names_of_answer(test: str) -> set[str]:
    """Return the global names that tests read and do not define: those of the answer.

    Names that Python has are Python's, unless there is no other: a function may be called sum.
    """
    read, bound = set(), set()
    tables = [symtable.symtable(test, "tests", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table.get_type() == "module" or symbol.is_global():
                if symbol.is_referenced():
                    read.add(symbol.get_name())
                if symbol.is_assigned() or symbol.is_imported():
                    bound.add(symbol.get_name())
    free = read - bound - _NEVER_OF_ANSWER
    return {name for name in free if not hasattr(builtins, name)} or free
