"""Configurations that functions of the API accept."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphtrain.api.checks.checked import CheckedConfig
    from graphtrain.api.checks.purpose import Purpose
    from graphtrain.cache import Cache
    from graphtrain.config.schema import Config
    from graphtrain.run.events import RunSummary

    # Path of a file or of the directory of a run; TOML, a string of several lines; tables as a
    # dict; a loaded configuration; or the summary of a run. Commands pass one that they checked.
    Source = str | os.PathLike[str] | Mapping[str, Any] | Config | RunSummary | CheckedConfig

Settings = Sequence[str] | Mapping[str, Any]  # "section.name=value", or values by name

_logger = logging.getLogger("graphtrain")
log: Callable[[str], None] = _logger.info
Observer = Callable[[str, str], None]  # called with the label of a graph and its current stage


def observe_nothing(label: str, stage: str) -> None:
    """Ignore the progress of a compilation."""


def load_config(source: Source, *, set: Settings = (), target: str | None = None) -> Config:
    """Load a configuration.

    Args:
        source: Path of a file or of the directory of a run; TOML, a string of several lines; tables
            as a dict; a loaded configuration; or the summary of a run.
        set: Settings to change: ["run.steps=10"], as --set, or {"run.steps": 10}.
        target: Machine to compile for, in place of program.target.

    Raises:
        ConfigError: one line for each problem.
    """
    from graphtrain.config.load import UnknownVocabulary
    from graphtrain.config.load import load_config as load
    from graphtrain.errors import ConfigError

    try:
        return load(_as_file(source), overrides_of(set), target)
    except UnknownVocabulary as error:  # a class of the checks, by whose name nobody knows it
        raise ConfigError(str(error)) from None


def checked_config(
    source: Source,
    purpose: Purpose,
    *,
    set: Settings = (),
    target: str | None = None,
    allow_change: Sequence[str] = (),
    rank: int = 0,
) -> CheckedConfig:
    """Load a configuration and check it for a purpose, unless its command has done so.

    Raises:
        ConfigError: one line for each problem.
    """
    from graphtrain.api.checks.checked import CheckedConfig, check_config

    if isinstance(source, CheckedConfig):
        assert source.purpose.covers(purpose) and not set and target is None
        return source
    return check_config(
        _as_file(source),
        purpose,
        overrides=overrides_of(set),
        target=target,
        allowed_changes=allow_change,
        rank=rank,
    )


def overrides_of(settings: Settings) -> list[str]:
    """Return settings as --set has them.

    Raises:
        ConfigError: they are neither strings nor a mapping.
    """
    from graphtrain.config.render import toml
    from graphtrain.errors import ConfigError

    if isinstance(settings, Mapping):
        return [f"{name}={toml(value)}" for name, value in settings.items()]
    if isinstance(settings, str):
        return [settings]
    if not isinstance(settings, Iterable) or not all(isinstance(one, str) for one in settings):
        raise ConfigError(
            f'set = {settings!r}: must be like ["run.steps=10"], or {{"run.steps": 10}}'
        )
    return list(settings)


def _as_file(source: Source) -> Any:
    """Return the directory in place of the summary of a run."""
    is_text = isinstance(source, str | os.PathLike | Mapping)
    return source if is_text else getattr(source, "directory", source)


def open_cache(cache: str | os.PathLike[str] | None) -> Cache:
    """Return the cache in a directory; None for $GRAPHTRAIN_CACHE, else ./cache."""
    from graphtrain.cache import Cache, default_root

    return Cache(default_root() if cache is None else Path(cache))


def name_of(source: Source) -> str:
    """Return the name of a configuration for messages."""
    from graphtrain.api.checks.checked import CheckedConfig

    source = _as_file(source.source if isinstance(source, CheckedConfig) else source)
    if isinstance(source, str | os.PathLike) and "\n" not in (name := str(source)):
        return name
    return "configuration"
