"""Loading of a configuration from TOML and --set, with all problems reported at once."""

import json
import math
from collections.abc import Iterator, Sequence
from datetime import date, time
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from graphtrain.config.lines import KeyPath
from graphtrain.config.overrides import parse_overrides
from graphtrain.config.presets import apply_preset
from graphtrain.config.schema import Config
from graphtrain.errors import ConfigError
from sharding_rules.documents import MAX_TOML_BYTES, DocumentError, parse_toml, read_text

_MAX_PROBLEMS = 50  # of one configuration that are reported


def load_config(path: Path, overrides: Sequence[str] = (), target: str | None = None) -> Config:
    """Load the configuration in `path`, changed by overrides ("section.name=value") and `target`.

    Raises:
        ConfigError: one line for each problem: the file and line or the flag that caused it, the
            setting, and the values that it accepts.
    """
    changes = parse_overrides(overrides, target)
    text = _read(path)
    try:
        document = parse_toml(text)
    except DocumentError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    blocked = [change for change in changes if not change.apply(document)]
    apply_preset(document)
    foreign = set(_foreign((), document))
    errors = []
    try:
        # Through JSON, because the strict schema refuses Python dicts and lists.
        config = TypeAdapter(Config).validate_json(json.dumps(document, default=lambda _: None))
        if not blocked and not foreign:
            return config
    except ValidationError as error:
        errors = error.errors(include_url=False)

    from graphtrain.config.problems import (  # not needed for a valid file
        ConfigSource,
        explain,
    )

    problems = explain(ConfigSource(path, text, changes), document, errors, foreign)
    shown = list(islice(problems, _MAX_PROBLEMS))
    if next(problems, None) is not None:
        shown.append(f"{path}: more problems; these are the first {_MAX_PROBLEMS}")
    raise ConfigError("\n".join(shown))


def _read(path: Path) -> str:
    try:
        return read_text(path, MAX_TOML_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_close_by(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory{_close_by(path / '_')}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except DocumentError as error:
        location = f"{path}:{error.line}" if error.line else f"{path}"
        raise ConfigError(f"{location}: {error.reason}") from error


def _close_by(path: Path) -> str:
    """Suggest files that the user may have meant."""
    from difflib import get_close_matches

    try:
        present = sorted(file.name for file in path.parent.iterdir() if file.suffix == ".toml")
    except OSError:
        return f"; {path.parent} is not a directory either" if not path.parent.is_dir() else ""
    stems = [name.removesuffix(".toml") for name in present]
    if close := get_close_matches(path.name[:100].removesuffix(".toml"), stems, n=1):
        return f"; did you mean {path.parent / close[0]}.toml?"
    return f"; in the same directory: {', '.join(present[:5])}" if present else ""


def _foreign(path: KeyPath, value: Any) -> Iterator[KeyPath]:
    """Yield the paths of values that no setting accepts: dates, infinity, NaN, large integers.

    Validation does not refuse them all: JSON cannot represent a date, so it would see null.
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
