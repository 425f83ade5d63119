"""TOML and --set to Config, or every reason why not at once."""

import json
import math
import tomllib
from collections.abc import Iterator, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from graphtrain.config.lines import KeyPath
from graphtrain.config.overrides import parse_overrides
from graphtrain.config.presets import apply_preset
from graphtrain.config.schema import Config
from graphtrain.errors import ConfigError


def load_config(path: Path, overrides: Sequence[str] = (), target: str | None = None) -> Config:
    """The configuration in path, changed by overrides ("section.name=value") and target.

    Raises:
        ConfigError: all that is wrong, one line for each: the file and line or the flag to blame,
            the setting, and what it should be.
    """
    changes = parse_overrides(overrides, target)
    text = _read(path)
    try:
        document = tomllib.loads(text)
    except ValueError as error:  # besides TOMLDecodeError: Python refuses numbers of 5000 digits
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    blocked = [change for change in changes if not change.apply(document)]
    apply_preset(document)
    foreign = set(_foreign((), document))
    errors = []
    try:
        # JSON, because the schema is strict: Python's own dicts and lists would be refused.
        config = TypeAdapter(Config).validate_json(json.dumps(document, default=lambda _: None))
        if not blocked and not foreign:
            return config
    except ValidationError as error:
        errors = error.errors(include_url=False)

    from graphtrain.config.problems import (  # only here: a good file needs none
        ConfigSource,
        explain,
    )

    raise ConfigError(
        "\n".join(explain(ConfigSource(path, text, changes), document, errors, foreign))
    )


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_close_by(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory{_close_by(path / '_')}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8") from error


def _close_by(path: Path) -> str:
    """A hint at the files the user may have meant."""
    from difflib import get_close_matches

    try:
        present = sorted(file.name for file in path.parent.iterdir() if file.suffix == ".toml")
    except OSError:
        return f"; {path.parent} is no directory either" if not path.parent.is_dir() else ""
    stems = [name.removesuffix(".toml") for name in present]
    if close := get_close_matches(path.name.removesuffix(".toml"), stems, n=1):
        return f"; did you mean {path.parent / close[0]}.toml?"
    return f"; close by: {', '.join(present[:5])}" if present else ""


def _foreign(path: KeyPath, value: Any) -> Iterator[KeyPath]:
    """Paths of values no setting takes: dates, infinities, not-a-number, integers over 64 bits.

    Validation does not refuse them all: JSON cannot hold a date, so it would see a null.
    """
    match value:
        case dict():
            for name, inner in value.items():
                yield from _foreign((*path, name), inner)
        case list():
            for inner in value:
                yield from _foreign(path, inner)
        case date() | time():
            yield path
        case float() if not math.isfinite(value):
            yield path
        case int() if value.bit_length() > 63:
            yield path
