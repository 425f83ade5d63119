"""What a compiler made: the executable's bytes, and facts about it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

# Raise it when records or payloads hold more: what was stored before is then compiled again.
RECORD_VERSION = 4

# str, int, finite float, bool, None, lists and mappings of these; spelt out, every use needs a cast
JSON: TypeAlias = Any


@dataclass(frozen=True)
class Artifact:
    """A compiled program as it is stored and sent, not as it runs.

    The payload is code: load it only when it came from a store that you write.
    """

    payload: bytes
    record: Mapping[
        str, JSON
    ]  # plan, memory, collectives ...: readable without loading the payload
