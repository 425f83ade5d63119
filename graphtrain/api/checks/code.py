"""Problems of the code that settings name: absent files and names, syntax errors, wrong arguments.

The code is parsed and not run, so that neither JAX nor PyTorch is imported.
"""

import ast
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graphtrain.api.checks.problem import Problem
from graphtrain.config.lines import KeyPath
from graphtrain.config.schema import FlaxModel, Program, TorchModel
from graphtrain.config.user_code import UserCode, is_user_code
from graphtrain.errors import ConfigError

# Code that can define names which its text does not contain.
_DYNAMIC = {"__getattr__", "exec", "globals", "setattr", "vars"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def code_problems(program: Program, *, trains: bool = True) -> Iterator[Problem]:
    """Yield the problems of the model's code and, unless nothing is trained, of the others'."""
    model = program.model
    if isinstance(model, FlaxModel):
        yield from _problems(model.user_code, model.arguments, named=("vocab", "dtype", "rngs"))
    elif isinstance(model, TorchModel) and model.torch and is_user_code(model.torch):
        yield from _problems(UserCode("program.model.torch", "", model.torch))
    if not trains:
        return
    if (code := program.optimizer.user_code) is not None:
        yield from _problems(code, program.optimizer.arguments)
    if (code := program.loss.user_code) is not None:
        yield from _problems(code, program.loss.arguments, positional=2)


def _problems(
    code: UserCode,
    arguments: Mapping[str, Any] | None = None,
    *,
    positional: int = 0,
    named: Sequence[str] = (),
) -> Iterator[Problem]:
    """Yield why an object cannot be imported, or called with arguments.

    Args:
        code: the object.
        arguments: those that its table sets; None: they are not checked.
        positional: number of the arguments before them.
        named: further arguments that it is called with.
    """
    setting = tuple(code.setting.split("."))
    try:
        path = code.source()
    except ConfigError as error:  # another machine may have it
        yield Problem("machine", str(error), (setting,))
        return
    if path is None or path.suffix != ".py":
        return
    file, name = os.path.relpath(path), code.reference.rpartition(":")[2]
    try:
        module = ast.parse(path.read_bytes(), file)
    except SyntaxError as error:
        message = f"{code}: {error.msg}: {(error.text or '').strip()}"
        yield Problem("program", message, location=f"{file}:{error.lineno}")
        return
    except (OSError, ValueError) as error:
        yield Problem("program", f"{code}: {file} cannot be read: {error}", (setting,))
        return
    found = _definitions(module)
    if name not in found:
        if not _is_dynamic(module):
            yield Problem("program", f"{code}: {_undefined(name, file, found)}", (setting,))
    elif arguments is not None and isinstance(found[name], _FUNCTIONS):
        place = f"{name} of {file}:{found[name].lineno}"
        yield from _argument_problems(found[name], place, setting, arguments, positional, named)


def _definitions(module: ast.Module) -> dict[str, Any]:
    """Return the statement that defines each name of a module, also inside of if, try and with."""
    found: dict[str, Any] = {}
    pending: list[ast.AST] = [*reversed(module.body)]
    while pending:
        node = pending.pop()
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            found[node.name] = node
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.alias):
            found[(node.asname or node.name).partition(".")[0]] = node
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = node
        pending += reversed([*ast.iter_child_nodes(node)])
    return found


def _is_dynamic(module: ast.Module) -> bool:
    """Return whether a module may define names that its text does not contain."""
    for node in ast.walk(module):
        if isinstance(node, ast.alias) and node.name == "*":
            return True
        name = getattr(node, "id", None) or getattr(node, "name", None)
        if isinstance(name, str) and name in _DYNAMIC:
            return True
    return False


def _undefined(name: str, file: str, found: Mapping[str, Any]) -> str:
    """Say that a file does not define a name, and which it defines."""
    callables = {
        other: node.lineno
        for other, node in found.items()
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and not other.startswith("_")
    }
    names = difflib.get_close_matches(name, callables, 1) or sorted(callables)
    if not names:
        return f"{file} defines no {name}, nor another function or class"
    places = ", ".join(f"{one} ({file}:{callables[one]})" for one in names[:5])
    return f"{file} defines no {name}; it defines {places}"


def _argument_problems(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
    place: str,
    setting: KeyPath,
    arguments: Mapping[str, Any],
    positional: int,
    named: Sequence[str],
) -> Iterator[Problem]:
    """Yield which arguments a function does not take, and which it needs."""
    if function.decorator_list:  # they may change its arguments
        return
    taken = function.args
    ordered = [one.arg for one in (*taken.posonlyargs, *taken.args)]
    required = set(ordered[positional : len(ordered) - len(taken.defaults)])
    for one, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True):
        required |= {one.arg} if default is None else set()
    accepted = [*ordered[positional:], *(one.arg for one in taken.kwonlyargs)]
    free = [one for one in accepted if one not in named]
    table = (*setting[:-1], "arguments")
    for name in arguments:
        if name not in accepted and taken.kwarg is None:
            message = (
                f"{'.'.join(table)}.{name}: {place} does not take it; it takes "
                f"{', '.join(free) or 'no arguments'}"
            )
            yield Problem("program", message, ((*table, name), table))
    for name in sorted(required - set(arguments) - set(named)):
        message = f"{place} needs the argument {name}; set {'.'.join(table)}.{name}"
        yield Problem("program", message, (setting,))
