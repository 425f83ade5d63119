"""Attributes of the instructions that delimit a region; see lowering.tracing.operator_regions."""

from collections.abc import Mapping

ENTRY, EXIT = "graphtrain_entry", "graphtrain_exit"  # the region's name
SETTINGS = "graphtrain_settings"  # JSON, at the exit


def marks(attributes: Mapping[str, str]) -> dict[str, str]:
    """Return those of an instruction's attributes that mark a region's entry or exit."""
    return {name: attributes[name] for name in (ENTRY, EXIT, SETTINGS) if name in attributes}
