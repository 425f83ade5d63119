"""Error messages of a configuration: the setting, where it is set, the values it accepts."""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import cached_property
from typing import Any

from pydantic_core import ErrorDetails

from graphtrain.config.foreign_names import conversion, setting_for
from graphtrain.config.lines import KeyPath, line_numbers
from graphtrain.config.overrides import Override
from graphtrain.config.render import dotted, toml
from graphtrain.config.schema.types import WRONG_PATH
from graphtrain.config.settings import holds_settings, known_settings, words
from lowering.errors import LoweringError
from lowering.machine.target import Target

_TARGET = ("program", "target")
_LONGEST_NAME = 200  # characters of a setting that may be misspelt
_GENERAL_WORDS = {"id", "kind", "name", "type"}  # that say nothing of what another table has
_LONGEST_VALUE = 60  # characters of a value shown


@dataclass(frozen=True)
class ConfigSource:
    """A configuration and the flags that changed it."""

    name: str  # path of its file, for messages
    text: str
    overrides: tuple[Override, ...]
    has_lines: bool = True  # False: the user wrote no text

    @cached_property
    def lines(self) -> dict[KeyPath, int]:
        return line_numbers(self.text)

    def line(self, path: KeyPath) -> int | None:
        """Return the line that sets `path`, or the first setting in it."""
        inside = [line for key, line in self.lines.items() if _within(key, path)]
        return self.lines.get(path) or min(inside, default=None)

    def location(self, line: int | None) -> str:
        return f"{self.name}:{line}" if line and self.has_lines else self.name

    def flag(self, path: KeyPath) -> Override | None:
        """Return the last override that set `path`."""
        matching_overrides = [change for change in self.overrides if _within(path, change.path)]
        return matching_overrides[-1] if matching_overrides else None


def explain(
    source: ConfigSource,
    document: dict[str, Any],
    errors: Sequence[ErrorDetails],
    foreign: Collection[KeyPath],
) -> Iterator[str]:
    """Yield one line per problem: unknown settings, values, missing settings, then the target."""
    by_type: dict[str, dict[KeyPath, ErrorDetails]] = {}
    for error in errors:
        kind = error["type"] if error["type"] in _OWN_WORDS else "value"
        path = _untagged(tuple(map(str, error["loc"])))
        by_type.setdefault(kind, {}).setdefault(path if kind != "value" else _setting(path), error)

    suggested: set[KeyPath] = set()
    for location, path in _unknown(source, by_type.get("unexpected_keyword_argument", {})):
        suggestion, hint = _suggestion(path)
        suggested.add(suggestion)
        yield f"{location}: unknown setting {dotted(path)}; {hint}"

    wrong_paths = by_type.get(WRONG_PATH, {})
    for location, error in wrong_paths.items():
        yield f"{_location_of(source, _setting(location))}: {error['msg']}"
    values = dict.fromkeys(sorted(foreign)) | by_type.get("value", {})
    for path, error in values.items():
        in_part = (p for kind, found in by_type.items() if kind != "value" for p in found)
        if any(_within(p, path) and p != path for p in in_part) or path in map(
            _setting, wrong_paths
        ):  # the other branch of a union
            continue
        if path in known_settings() and not _is_table_created_by_flag(source, path):
            yield _wrong_value(source, path, _look_up(document, path), _choices_of_branch(error))
    for path, error in by_type.get("value_error", {}).items():
        cause = error.get("ctx", {}).get("error", error["msg"])
        yield _failed_check(source, path, str(cause), getattr(cause, "within", ()))
    for path in by_type.get("missing", {}):
        if path not in suggested:  # already suggested for an unknown setting
            yield _missing(source, path)
    for error in by_type.get("json_invalid", {}).values():
        yield f"{source.name}: {error['msg']}"
    yield from _wrong_target(source, document)


_OWN_WORDS = {"unexpected_keyword_argument", "missing", "value_error", "json_invalid", WRONG_PATH}


def _wrong_target(source: ConfigSource, document: Mapping[str, Any]) -> Iterator[str]:
    """Yield that the target does not exist, which needs no other setting to be right."""
    program = document.get("program")
    target = program.get("target") if isinstance(program, dict) else None
    if isinstance(target, str):
        try:
            Target.parse(target)
        except LoweringError as error:
            yield f"{locate(source, [_TARGET])}: program.target: {error}"


def _location_of(source: ConfigSource, path: KeyPath) -> str:
    """Return where a setting is set, and its name unless the flag says it."""
    flag = source.flag(path)
    if flag and flag.path == path:
        return flag.flag
    return f"{flag.flag if flag else source.location(source.line(path))}: {dotted(path)}"


def _untagged(location: KeyPath) -> KeyPath:
    """Remove the tag that pydantic adds for the kind of model, or for a blend."""
    inside = location[:2] == ("program", "model") and location[2:3] in (
        ("native",),
        ("imported",),
        ("flax",),
    )
    if location[3:4] == ("tuple[BlendPart, ...]",):  # run.data.train as a blend
        return location[:3] + location[4:]
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
            yield source.location(source.line(path)), path
    for change in source.overrides:
        is_inside_value = any(
            not holds_settings(known_settings().get(change.path[:depth], {"properties": {}}))
            for depth in range(1, len(change.path))
        )
        if is_inside_value or any(_within(change.path, path) for path in errors):
            yield change.flag, change.path


def _is_table_created_by_flag(source: ConfigSource, path: KeyPath) -> bool:
    """Return whether a reported unknown setting below `path` is what made it a table."""
    is_overridden = any(_within(change.path, path) for change in source.overrides)
    return is_overridden and not source.flag(path) and not source.line(path)


def _suggestion(path: KeyPath) -> tuple[KeyPath, str]:
    """Return the setting that an unknown one most likely means, and a hint that names it."""
    if (setting := setting_for(path)) is not None:
        unit = f": {how}" if (how := conversion(path[-1])) else ""
        return setting, f"{path[-1]} is {dotted(setting)} in graphtrain{unit}"
    if len(".".join(path)) <= _LONGEST_NAME and (nearest := _nearest(path)):
        if nearest == path:
            return (), "it is a setting of another kind of model; see program.model.overrides"
        return nearest, f"did you mean {dotted(nearest)}?"
    return (), _choices(path[:-1])


def _nearest(path: KeyPath) -> KeyPath:
    """Return the most similar setting; empty if none is similar.

    A correct name in the wrong table comes first, then a misspelling in the right table.
    """
    settings = known_settings()

    def similarity(candidate: KeyPath) -> float:
        return SequenceMatcher(None, ".".join(path), ".".join(candidate)).ratio()

    if (table := _setting(path)) and "properties" not in settings[table]:
        return table
    siblings = [candidate for candidate in settings if candidate[:-1] == path[:-1]]
    elsewhere = () if path[-1].lower() in _GENERAL_WORDS else settings
    for candidates, cutoff in ((settings, 1.0), (siblings, 0.6), (elsewhere, 0.75)):
        names = {candidate[-1] for candidate in candidates}
        if close := get_close_matches(path[-1].lower(), names, n=1, cutoff=cutoff):
            return max(
                (candidate for candidate in candidates if candidate[-1] == close[0]), key=similarity
            )
    return ()


def _choices(table: KeyPath) -> str:
    """List the settings of a table, for a name that resembles none of them."""
    names = [path[-1] for path in known_settings() if path[:-1] == table]
    return (
        f"{dotted(table) or 'a configuration'} accepts {', '.join(names)}" if names else "remove it"
    )


def _choices_of_branch(error: ErrorDetails | None) -> str:
    """Return the named values that this kind of model accepts; another may accept more."""
    if error is None or error["type"] != "literal_error":
        return ""
    return str(error.get("ctx", {}).get("expected", "")).replace("'", '"')


def _wrong_value(source: ConfigSource, path: KeyPath, value: Any, accepted: str) -> str:
    node = known_settings()[path]
    requirement = f"should be {accepted if accepted and 'enum' in node else words(node)}"
    if isinstance(value, float) and not math.isfinite(value):
        requirement = "should be finite"
    elif isinstance(value, int) and value.bit_length() > 63:
        requirement = "should fit in 64 bits"
    elif value == "" and node.get("minLength"):
        requirement = "should not be empty"
    if path == ("run", "learning_rate"):
        requirement += "; the peak learning rate is run.learning_rate.peak"
    flag = source.flag(path)
    if words(node) == "a string" and not isinstance(value, dict | list | str):
        quoted = toml(toml(value))
        requirement += f"; write {dotted(path)}='{quoted}'" if flag else f"; write {quoted}"
    location = _location_of(source, path)
    if flag and flag.path == path:
        return f"{location}: {requirement}"
    value_text = toml(value)
    if len(value_text) > _LONGEST_VALUE:
        value_text = value_text[:_LONGEST_VALUE] + "..."
    return f"{location} = {value_text}: {requirement}"


def _failed_check(source: ConfigSource, table: KeyPath, message: str, within: KeyPath = ()) -> str:
    """Describe a failed check of several settings, at the last flag or first line that set one.

    Args:
        source: The configuration.
        table: Table of the settings.
        message: What is wrong.
        within: Table in it, of an array of tables, that is the place of the mistake.
    """
    settings = [(*table, *within)] if within else mentioned_settings(message, table)
    settings.sort(key=lambda path: source.lines.get(path, 0))
    name = f"{dotted(table)}: " if table else ""
    return f"{locate(source, settings, table)}: {name}{message}"


def mentioned_settings(message: str, table: KeyPath = ()) -> list[KeyPath]:
    """Return the settings of a table that a message names, relative to the table."""
    return [
        path
        for path in known_settings()
        if len(path) > max(1, len(table))  # "program" and "run" are words of any message
        and _within(path, table)
        and re.search(rf"(?<![\w.]){re.escape('.'.join(path[len(table) :]))}(?![\w.])", message)
    ]


def locate(source: ConfigSource, settings: Collection[KeyPath], table: KeyPath = ()) -> str:
    """Return the last flag that sets one of several settings, else the line of the first of them.

    If none is set, return the line of the table that they are in.
    """
    flags = [
        change.flag
        for change in source.overrides
        if any(_within(path, change.path) for path in settings)
    ]
    lines = (line for path in settings if (line := source.lines.get(path)))
    return flags[-1] if flags else source.location(next(lines, source.line(table)))


def _missing(source: ConfigSource, path: KeyPath) -> str:
    if path not in known_settings():  # inside one of several forms of a setting
        return f"{_location_of(source, _setting(path))}: {path[-1]} is missing in a table of it"
    flag = source.flag(path)
    location = flag.flag if flag else source.location(source.lines.get(path[:-1]))
    needs = known_settings()[path].get("required", [])
    hint = f"; it needs {', '.join(needs)}" if needs else ""
    return f"{location}: {dotted(path)} is missing{hint}"
