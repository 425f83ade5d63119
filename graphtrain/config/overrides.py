"""Overrides from the command line: --set section.name=value."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, time
from typing import Any

from graphtrain.config.lines import KeyPath
from graphtrain.errors import ConfigError


@dataclass(frozen=True)
class Override:
    """One setting given on the command line, and the flag that gave it."""

    path: KeyPath
    value: Any
    flag: str

    def apply(self, document: dict[str, Any]) -> bool:
        """Set the value in `document`; return False if a part of its path is not a table."""
        table = document
        for name in self.path[:-1]:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                return False
        table[self.path[-1]] = self.value
        return True


def parse_overrides(changes: Sequence[str], target: str | None) -> tuple[Override, ...]:
    """Return the overrides in order. The target comes last and takes precedence."""
    parsed: list[Override] = []
    problems: list[str] = []
    for change in changes:
        try:
            parsed.append(_parse(change))
        except ConfigError as error:
            problems.append(f"--set {change}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    if target is not None:
        parsed.append(Override(("program", "target"), target, f"--target {target}"))
    return tuple(parsed)


def _parse(change: str) -> Override:
    key, equals, text = change.partition("=")
    path = tuple(component.strip() for component in key.split("."))
    if not equals or not all(path):
        raise ConfigError("expected section.name=value, for example run.steps=10")
    if (
        change != change.encode(errors="replace").decode()
    ):  # bytes from the shell that are not UTF-8
        raise ConfigError("is not UTF-8 text")
    if not text.strip():
        raise ConfigError('has no value; write "" for an empty string')
    return Override(path, _value(text.strip()), f"--set {change}")


def _value(text: str) -> Any:
    """Parse a TOML value. Anything that is not valid TOML is a string: paths need no quotes."""
    try:
        document = tomllib.loads(f"value = {text}")
    except ValueError as error:  # besides TOMLDecodeError: Python refuses numbers of 5000 digits
        if (
            text[0] in "\"'[{"
        ):  # meant as TOML; as a string it would fail later, with a less clear error
            raise ConfigError(
                f"not a valid TOML value: {str(error).partition(' (at')[0]}"
            ) from error
        return text
    value = document["value"]
    # No setting is a date, but a run may be named after one.
    return text if len(document) > 1 or isinstance(value, date | time) else value
