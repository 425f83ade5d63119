"""Attributes of the HLO instructions that begin and end a region; see operator_regions."""

from collections.abc import Mapping

ENTRY, EXIT = "graphtrain_entry", "graphtrain_exit"  # the region's name
SETTINGS = "graphtrain_settings"  # JSON, at the exit


def marks(attributes: Mapping[str, str]) -> dict[str, str]:
    """Those of an instruction's attributes that make it a mark."""
    return {name: attributes[name] for name in (ENTRY, EXIT, SETTINGS) if name in attributes}
