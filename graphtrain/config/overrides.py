"""Changes from the command line: --set section.name=value."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, time
from typing import Any

from graphtrain.config.lines import KeyPath
from graphtrain.errors import ConfigError


@dataclass(frozen=True)
class Override:
    """One setting given on the command line, and the flag to blame for it."""

    path: KeyPath
    value: Any
    flag: str

    def apply(self, document: dict[str, Any]) -> bool:
        """Put the value into document; False if something that is no table is in its way."""
        table = document
        for name in self.path[:-1]:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                return False
        table[self.path[-1]] = self.value
        return True


def parse_overrides(changes: Sequence[str], target: str | None) -> tuple[Override, ...]:
    """The overrides in order; the target comes last, so that it wins."""
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
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise ConfigError("should be section.name=value, as in run.steps=10")
    if change != change.encode(errors="replace").decode():  # bytes of the shell that are no text
        raise ConfigError("is not UTF-8 text")
    if not text.strip():
        raise ConfigError('has no value; an empty text is ""')
    return Override(path, _value(text.strip()), f"--set {change}")


def _value(text: str) -> Any:
    """A TOML value; what is none is a text, so that paths and targets need no quotes."""
    try:
        document = tomllib.loads(f"value = {text}")
    except ValueError as error:  # besides TOMLDecodeError: Python refuses numbers of 5000 digits
        if text[0] in "\"'[{":  # meant as TOML; as a text it would fail later and further away
            raise ConfigError(f"not a TOML value: {str(error).partition(' (at')[0]}") from error
        return text
    value = document["value"]
    # No setting is a date, and a run may well be named after one.
    return text if len(document) > 1 or isinstance(value, date | time) else value
