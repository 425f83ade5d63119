"""Rendering of a configuration as a TOML file that loads back to the same configuration."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from graphtrain.config.lines import KeyPath
from graphtrain.config.schema import (
    Config,
    FlaxModel,
    Model,
    Precision,
    Program,
    TorchModel,
)

_MODELS = (Model, TorchModel, FlaxModel)


def render(config: Config, *, with_choices: bool = False) -> str:
    """Return the resolved settings as TOML, each with its description; unset ones are omitted.

    Args:
        config: the settings.
        with_choices: whether a description also lists the values that the setting accepts.
    """
    return "\n".join(_table((), config, with_choices)).lstrip("\n") + "\n"


def render_model(model: Model) -> str:
    """Return the settings of a model as the [program.model] of a configuration file."""
    return "\n".join(_table(("program", "model"), model, with_choices=False)).lstrip("\n") + "\n"


def _table(path: KeyPath, table: Any, with_choices: bool) -> Iterator[str]:
    """Yield the lines of a table: its own settings first, as TOML requires, then its tables."""
    from graphtrain.config.settings import description, meanings  # not needed to load a file

    if path:
        summary = (type(table).__doc__ or "").partition("\n")[0]
        yield from ["", f"[{dotted(path)}]" + (f"  # {summary}" if summary else "")]
    inner: dict[str, Any] = {}
    for name, value in _settings(table):
        if is_dataclass(value):
            inner[name] = value
        else:
            if with_choices:
                meaning = description((*path, name))
            else:
                meaning = meanings().get((type(table).__name__, name))
            yield f"{name} = {toml(value)}" + (f"  # {meaning}" if meaning else "")
    for name, value in inner.items():
        yield from _table((*path, name), value, with_choices)


def as_document(config: Config) -> dict[str, Any]:
    """Return the resolved settings as the tables that a file has; unset ones are omitted."""
    return _as_tables(config)


def _as_tables(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_tables(entry) for entry in value]
    if is_dataclass(value):
        return {name: _as_tables(inner) for name, inner in _settings(value)}
    return value


def _settings(table: Any) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a table that are set, by name.

    The dtype of computation, which all code reads from the model, is precision.compute.
    """
    for field in fields(table):
        value = getattr(table, field.name)
        if isinstance(table, Program) and isinstance(value, Precision):
            value = replace(value, compute=table.compute)
        is_older_name = isinstance(table, _MODELS) and field.name == "dtype"
        if value is not None and not is_older_name:
            yield field.name, value


def toml_document(document: Mapping[str, Any]) -> str:
    """Return tables as TOML, one line for each of the root."""
    return "".join(f"{dotted((name,))} = {toml(value)}\n" for name, value in document.items())


def toml(value: Any) -> str:
    """Return a value in TOML syntax."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # JSON strings are TOML strings, except that TOML requires DEL to be escaped.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(toml, value))}]"
        case _ if is_dataclass(value):
            pairs = ((field.name, getattr(value, field.name)) for field in fields(value))
            return toml({name: inner for name, inner in pairs if inner is not None})
        case dict():
            pairs = (f"{dotted((name,))} = {toml(inner)}" for name, inner in value.items())
            return f"{{{', '.join(pairs)}}}"
        case int() | float():
            return repr(value)
        case _:
            return str(value)  # dates and times


def dotted(path: KeyPath) -> str:
    """Return a dotted key in TOML syntax, quoted where necessary."""
    return ".".join(key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml(key) for key in path)
