"""Overrides from the command line: --set section.name=value, or another option of a command."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, time
from typing import Any

from graphtrain.config.lines import KeyPath
from graphtrain.errors import ConfigError
from sharding_rules.documents import MAX_DEPTH, DocumentError, parse_toml

_LONGEST_FLAG = 200  # characters of a flag shown


class With(str):
    """A change that graphtrain plan diff --with gave, which messages name in place of --set."""

    __slots__ = ()


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
            problems.append(f"{_flag(change)}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    if target is not None:
        parsed.append(Override(("program", "target"), target, f"--target {target[:_LONGEST_FLAG]}"))
    return tuple(parsed)


def _flag(change: str) -> str:
    """Return the flag for messages, shortened and in one line."""
    shown = change[:_LONGEST_FLAG].replace("\r", "\\r").replace("\n", "\\n")
    option = "--with" if isinstance(change, With) else "--set"
    return f"{option} {shown}{'...' if len(change) > _LONGEST_FLAG else ''}"


def _parse(change: str) -> Override:
    key, equals, text = change.partition("=")
    path = tuple(component.strip() for component in key.split("."))
    if not equals or not all(path):
        raise ConfigError("expected section.name=value, for example run.steps=10")
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"the name has {len(path)} parts; {MAX_DEPTH} is the limit")
    if (
        change != change.encode(errors="replace").decode()
    ):  # bytes from the shell that are not UTF-8
        raise ConfigError("is not UTF-8 text")
    if not text.strip():
        raise ConfigError('has no value; write "" for an empty string')
    return Override(path, _value(text.strip()), _flag(change))


def _value(text: str) -> Any:
    """Parse a TOML value. Anything that is not valid TOML is a string: paths need no quotes."""
    try:
        document = parse_toml(f"value = {text}")
    except DocumentError as error:
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
