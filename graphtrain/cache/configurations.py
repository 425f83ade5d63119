"""Stored programs, grouped by the configuration that they were compiled from."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from graphtrain.cache.descriptions import SettingsText, describe_settings, distinction, flatten
from graphtrain.cache.entries import CacheEntry


@dataclass(frozen=True)
class StoredConfiguration:
    """Configuration with its programs in the cache."""

    name: str  # as its user named it; empty if that was not stored
    description: str  # of its settings, in words
    distinction: str  # settings that differ from those of one with the same name and description
    entries: tuple[CacheEntry, ...]

    def __str__(self) -> str:
        """Return one line of what is known."""
        described = "; ".join(filter(None, [self.description, self.distinction]))
        return ": ".join(filter(None, [self.name, described])) or "unknown configuration"


def group_by_configuration(entries: Iterable[CacheEntry]) -> Iterator[StoredConfiguration]:
    """Yield the configurations of entries, in the order in which the entries name them first."""
    groups: dict[SettingsText, list[CacheEntry]] = defaultdict(list)
    for entry in entries:
        groups[entry.settings].append(entry)
    first: dict[tuple[str, str], SettingsText] = {}
    for settings, members in groups.items():
        name = next((one.origin.configuration for one in members if one.origin.configuration), "")
        description = str(describe_settings(settings))
        alike = first.setdefault((name, description), settings)
        difference = distinction(flatten(settings), flatten(alike))
        yield StoredConfiguration(name, description, difference, tuple(members))
