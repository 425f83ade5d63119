"""Settings of a run by their full names, as trackers store them."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from graphtrain.config.render import toml
from graphtrain.config.schema import Config


def named_settings(config: Config) -> dict[str, str]:
    """Return the settings that have a value, by name, as TOML."""
    return dict(_flat(asdict(config), ""))


def _flat(tables: Mapping[str, Any], prefix: str) -> list[tuple[str, str]]:
    found = []
    for name, value in tables.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        elif value is not None:
            found.append((f"{prefix}{name}", toml(value)))
    return found
