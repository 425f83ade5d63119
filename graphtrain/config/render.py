"""A configuration as a TOML file that loads back to the same configuration."""

import json
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from graphtrain.config.lines import KeyPath
from graphtrain.config.schema import Config, Model


def render(config: Config) -> str:
    """The resolved settings as TOML, each with its meaning; those without a value are left out."""
    return "\n".join(_table((), config)).lstrip("\n") + "\n"


def render_model(model: Model) -> str:
    """The settings of a model as TOML, as a configuration holds them."""
    return "\n".join(_table(("program", "model"), model)).lstrip("\n") + "\n"


def _table(path: KeyPath, table: Any) -> Iterator[str]:
    """The lines of one table: its own settings first, as TOML wants them, then the tables in it."""
    from graphtrain.config.settings import meanings  # only here: loading a file needs none

    if path:
        summary = (type(table).__doc__ or "").partition("\n")[0]
        yield from ["", f"[{dotted(path)}]" + (f"  # {summary}" if summary else "")]
    inner: dict[str, Any] = {}
    for field in fields(table):
        value = getattr(table, field.name)
        if is_dataclass(value):
            inner[field.name] = value
        elif value is not None:
            meaning = meanings().get((type(table).__name__, field.name))
            yield f"{field.name} = {toml(value)}" + (f"  # {meaning}" if meaning else "")
    for name, value in inner.items():
        yield from _table((*path, name), value)


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # JSON's strings are TOML's, except that TOML also wants DEL escaped.
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
    """A key as TOML writes it: quoted where it has to be."""
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else toml(part) for part in path)
