"""Parser of operation names in a compiled program: model scope, phase and einsum."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Phase = Literal["forward", "backward", "recomputation", "update"]

# Names that JAX's transformations add to the name stack, which are not names of a model.
_JAX = {
    "",
    "body",
    "checkpoint",
    "closed_call",
    "cond",
    "custom_vjp_call",
    "rematted_computation",
    "shard_map",
    "while",
}
_CALLED = re.compile(r"^(?:jit|pjit|vmap|closed_call)\(.*\)$")
_DERIVED = re.compile(r"^(?:transpose|jvp|vmap)\((.*)\)$")
_EQUATION = re.compile(r"^([a-z]+),([a-z]+)->([a-z]*)$")


@dataclass(frozen=True)
class Scope:
    """One operation: its name scopes in the model, and the einsum that it computes."""

    names: tuple[str, ...]  # as in ("attention", "query")
    operation: str  # JAX primitive: "dot_general", "sharding_constraint"
    phase: Phase
    equation: tuple[str, str, str] | None = None  # letters of both operands and of the result

    @property
    def contracted(self) -> str:
        """Letters of the axes that the einsum contracts."""
        left, right, result = self.equation or ("", "", "")
        return "".join(letter for letter in left if letter in right and letter not in result)


def scopes(text: str) -> tuple[Scope, ...]:
    """Parse an operation's name; an operation that the compiler merged has several scopes.

    The name of a merged operation is "prefix/(one:another)".
    """
    return tuple(_scope(name) for name in _several(text)) if text else ()


def _several(text: str) -> list[str]:
    if not text.endswith(")"):
        return [text]
    open_index = _matching(text)
    alternatives = _split(text[open_index + 1 : -1], ":")
    if len(alternatives) < 2 or (open_index and text[open_index - 1] != "/"):
        return [text]
    return [text[:open_index] + alternative for alternative in alternatives]


def _matching(text: str) -> int:
    """Return the index of the parenthesis that the last character closes."""
    depth = 0
    for index in range(len(text) - 1, -1, -1):
        depth += (text[index] == ")") - (text[index] == "(")
        if depth == 0:
            return index
    return 0


def _split(text: str, separator: str) -> list[str]:
    """Split a text at separators outside of parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _scope(text: str) -> Scope:
    *outer_names, operation = _split(text, "/")
    names, equation = [], None
    for name in outer_names:
        while derived_match := _DERIVED.match(name):
            name = derived_match[1]
        equation_match = _EQUATION.match(name)
        if equation_match:
            equation = (equation_match[1], equation_match[2], equation_match[3])
        elif name not in _JAX and not _CALLED.match(name):
            names.append(name)
    return Scope(tuple(names), operation, _phase(text), equation)


def _phase(text: str) -> Phase:
    if "rematted_computation" in text:
        return "recomputation"
    if "transpose(" in text:
        return "backward"
    return "forward" if "jvp(" in text else "update"
