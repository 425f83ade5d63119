"""Compiled program as stored: the executable's bytes and a JSON record about it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

# Increment when the contents of records or payloads change. Older entries are then recompiled.
RECORD_VERSION = 8

# str, int, finite float, bool, None, and lists and mappings of these. A recursive type would need
# a cast at every use.
JSON: TypeAlias = Any


@dataclass(frozen=True)
class Artifact:
    """A serialized compiled program, as it is stored and transferred.

    The payload is executable code: load it only from a cache whose writers you trust.
    """

    payload: bytes
    record: Mapping[
        str, JSON
    ]  # plan, memory, collectives ...: readable without loading the payload
