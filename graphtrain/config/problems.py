"""Error messages of a configuration: the setting, where it is set, the values it accepts."""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic_core import ErrorDetails

from graphtrain.config.foreign_names import setting_for
from graphtrain.config.lines import KeyPath, line_numbers
from graphtrain.config.overrides import Override
from graphtrain.config.render import dotted, toml
from graphtrain.config.settings import holds_settings, known_settings, words

_LONGEST_VALUE = 60  # characters of a value shown


@dataclass(frozen=True)
class ConfigSource:
    """A configuration file and the flags that changed it."""

    path: Path
    text: str
    overrides: tuple[Override, ...]

    @cached_property
    def lines(self) -> dict[KeyPath, int]:
        return line_numbers(self.text)

    def line(self, path: KeyPath) -> int | None:
        """Return the line that sets `path`, or the first setting in it."""
        inside = [line for key, line in self.lines.items() if _within(key, path)]
        return self.lines.get(path) or min(inside, default=None)

    def place(self, line: int | None) -> str:
        return f"{self.path}:{line}" if line else f"{self.path}"

    def flag(self, path: KeyPath) -> Override | None:
        """Return the last override that set `path`."""
        given = [change for change in self.overrides if _within(path, change.path)]
        return given[-1] if given else None


def explain(
    source: ConfigSource,
    document: dict[str, Any],
    errors: Sequence[ErrorDetails],
    foreign: Collection[KeyPath],
) -> Iterator[str]:
    """Yield one line per problem: unknown settings, then values, then missing settings."""
    by_type: dict[str, dict[KeyPath, ErrorDetails]] = {}
    for error in errors:
        kind = error["type"] if error["type"] in _OWN_WORDS else "value"
        path = _untagged(tuple(map(str, error["loc"])))
        by_type.setdefault(kind, {}).setdefault(path if kind != "value" else _setting(path), error)

    suggested: set[KeyPath] = set()
    for place, path in _unknown(source, by_type.get("unexpected_keyword_argument", {})):
        meant, hint = _suggestion(path)
        suggested.add(meant)
        yield f"{place}: unknown setting {dotted(path)}; {hint}"

    values = dict.fromkeys(by_type.get("value", {})) | dict.fromkeys(sorted(foreign))
    for path in values:
        if path in known_settings() and not _made_by_a_flag_below(source, path):
            yield _wrong_value(source, path, _look_up(document, path))
    for path, error in by_type.get("value_error", {}).items():
        yield _failed_check(source, path, str(error.get("ctx", {}).get("error", error["msg"])))
    for path in by_type.get("missing", {}):
        if path not in suggested:  # already suggested for an unknown setting
            yield _missing(source, path)
    for error in by_type.get("json_invalid", {}).values():
        yield f"{source.path}: {error['msg']}"


_OWN_WORDS = {"unexpected_keyword_argument", "missing", "value_error", "json_invalid"}


def _untagged(location: KeyPath) -> KeyPath:
    """Remove the tag that pydantic adds for the kind of model."""
    inside = location[:2] == ("program", "model") and location[2:3] in (("native",), ("imported",))
    return location[:2] + location[3:] if inside else location


def _within(path: KeyPath, table: KeyPath) -> bool:
    """Return whether `path` is the table itself or something in it."""
    return path[: len(table)] == table


def _setting(location: KeyPath) -> KeyPath:
    """Remove what pydantic appends to a setting: the branch of a union, the index of an element."""
    while location and location not in known_settings():
        location = location[:-1]
    return location


def _look_up(document: Any, path: KeyPath) -> Any:
    for name in path:
        document = document[name]
    return document


def _unknown(source: ConfigSource, errors: Collection[KeyPath]) -> Iterator[tuple[str, KeyPath]]:
    """Yield each unknown setting with its origin: the file, a flag for a part of it, or both."""
    for path in errors:
        flag = source.flag(path)
        if flag and flag.path != path:  # a table given on the command line
            yield flag.flag, path
        elif source.line(path) or not any(
            _within(change.path, path) for change in source.overrides
        ):
            yield source.place(source.line(path)), path
    for change in source.overrides:
        below_a_value = any(
            not holds_settings(known_settings().get(change.path[:depth], {"properties": {}}))
            for depth in range(1, len(change.path))
        )
        if below_a_value or any(_within(change.path, path) for path in errors):
            yield change.flag, change.path


def _made_by_a_flag_below(source: ConfigSource, path: KeyPath) -> bool:
    """Return whether a reported unknown setting below `path` is what made it a table."""
    below = any(_within(change.path, path) for change in source.overrides)
    return below and not source.flag(path) and not source.line(path)


def _suggestion(path: KeyPath) -> tuple[KeyPath, str]:
    """Return the setting that an unknown one most likely means, and a hint that names it."""
    if (meant := setting_for(path)) is not None:
        return meant, f"{path[-1]} is {dotted(meant)} in graphtrain"
    if nearest := _nearest(path):
        return nearest, f"did you mean {dotted(nearest)}?"
    return (), _choices(path[:-1])


def _nearest(path: KeyPath) -> KeyPath:
    """Return the most similar setting; empty if none is similar.

    A correct name in the wrong table comes first, then a misspelling in the right table.
    """
    known = known_settings()

    def alike(other: KeyPath) -> float:
        return SequenceMatcher(None, ".".join(path), ".".join(other)).ratio()

    if (above := _setting(path)) and "properties" not in known[above]:
        return above
    siblings = [other for other in known if other[:-1] == path[:-1]]
    for candidates, cutoff in ((known, 1.0), (siblings, 0.6), (known, 0.75)):
        names = {other[-1] for other in candidates}
        if close := get_close_matches(path[-1].lower(), names, n=1, cutoff=cutoff):
            return max((other for other in candidates if other[-1] == close[0]), key=alike)
    return ()


def _choices(table: KeyPath) -> str:
    """List the settings of a table, for a name that resembles none of them."""
    names = [path[-1] for path in known_settings() if path[:-1] == table]
    return (
        f"{dotted(table) or 'a configuration'} accepts {', '.join(names)}" if names else "remove it"
    )


def _wrong_value(source: ConfigSource, path: KeyPath, value: Any) -> str:
    node = known_settings()[path]
    should = f"should be {words(node)}"
    if isinstance(value, float) and not math.isfinite(value):
        should = "should be finite"
    elif isinstance(value, int) and value.bit_length() > 63:
        should = "should fit in 64 bits"
    if path == ("run", "learning_rate"):
        should += "; the peak learning rate is run.learning_rate.peak"
    flag = source.flag(path)
    if words(node) == "a string" and not isinstance(value, dict | list):
        quoted = toml(toml(value))
        should += f"; write {dotted(path)}='{quoted}'" if flag else f"; write {quoted}"
    if flag and flag.path == path:
        return f"{flag.flag}: {should}"
    shown = toml(value)
    if len(shown) > _LONGEST_VALUE:
        shown = shown[:_LONGEST_VALUE] + "..."
    place = flag.flag if flag else source.place(source.line(path))
    return f"{place}: {dotted(path)} = {shown}: {should}"


def _failed_check(source: ConfigSource, table: KeyPath, message: str) -> str:
    """Describe a failed check of several settings, at the last flag or first line that set one."""
    named = [
        path
        for path in known_settings()
        if len(path) > len(table)
        and _within(path, table)
        and re.search(rf"(?<![\w.]){re.escape('.'.join(path[len(table) :]))}(?![\w.])", message)
    ]
    flags = [
        change.flag
        for change in source.overrides
        if any(_within(path, change.path) for path in named)
    ]
    lines = [line for path in named if (line := source.lines.get(path))]
    place = flags[-1] if flags else source.place(min(lines, default=source.line(table)))
    return f"{place}: {dotted(table)}: {message}"


def _missing(source: ConfigSource, path: KeyPath) -> str:
    flag = source.flag(path)
    place = flag.flag if flag else source.place(source.lines.get(path[:-1]))
    needs = known_settings()[path].get("required", [])
    more = f"; it needs {', '.join(needs)}" if needs else ""
    return f"{place}: {dotted(path)} is missing{more}"
