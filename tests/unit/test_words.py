"""The product's texts begin as docs/contributing/style.md says, and name what exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    file
    for package in ("graphtrain", "lowering", "sharding_rules")
    for file in sorted((ROOT / package).rglob("*.py"))
]
RIDDLES = re.compile(
    r"(Of|What|As|By|In place of|Whether|Where|How|Which|Beside|From|With|Without|So|That|Such)\b"
)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings() -> Iterator[tuple[str, Documented, str]]:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                line = getattr(node, "lineno", 1)
                yield f"{file.relative_to(ROOT)}:{line}", node, text


def test_no_docstring_begins_as_a_riddle():
    found = [f"{place}: {text.splitlines()[0]}" for place, _, text in docstrings()
             if RIDDLES.match(text)]  # fmt: skip
    assert found == []


def parameters(node: Documented) -> set[str]:
    if isinstance(node, ast.ClassDef):
        made = [one for one in node.body if getattr(one, "name", "") == "__init__"]
        if not made:
            return {ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)}
        return parameters(made[0])  # pyright: ignore[reportArgumentType]
    assert isinstance(node, ast.FunctionDef)
    return {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}


def test_docstrings_describe_parameters_that_exist():
    found = []
    for place, node, text in docstrings():
        described = re.search(r"(?m)^Args:\n((?:    .*\n?|\n)+)", text)
        names = re.findall(r"(?m)^    \*{0,2}(\w+):", described[1]) if described else []
        if unknown := set(names) - (parameters(node) if names else set()):
            found.append(f"{place}: {', '.join(sorted(unknown))}")
    assert found == []


def commands(command: click.Command, *names: str) -> Iterator[tuple[str, click.Command]]:
    yield " ".join(names), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, *names, name)


@pytest.mark.parametrize("what", ["a command", "an option"])
def test_help_is_a_sentence(what):
    from graphtrain.cli import _root

    texts = []
    for name, command in commands(_root, "graphtrain"):
        if what == "a command":
            texts.append((name, (command.help or "").partition("\n\n")[0]))
        else:
            options = [one for one in command.params if isinstance(one, click.Option)]
            texts += [(f"{name} {one.opts[0]}", one.help or "") for one in options]
    sentence = re.compile(r"[A-Z].*[.\])]\s*", re.DOTALL)
    assert [f"{name}: {text!r}" for name, text in texts if not sentence.fullmatch(text)] == []
