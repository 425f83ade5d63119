"""Marked regions in one device's HLO: which of them an operator can stand for.

A region's inside is left out if nobody else reads it and if it is what was traced: arithmetic on
what its entry gives. Where the partitioner has put a collective into it, or made it depend on the
device, it is not, and stays as it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from lowering.hlo.proto import Message
from lowering.tracing.region_marks import ENTRY, EXIT, SETTINGS

_FOREIGN = ("parameter", "partition-id", "replica-id", "custom-call", "while", "conditional")
_COLLECTIVES = ("all-", "collective-", "reduce-scatter")


@dataclass(frozen=True)
class Region:
    """One region of a computation."""

    name: str
    settings: dict[str, Any]
    entry: int  # id of the instruction that it begins with
    inside: tuple[int, ...]  # ids that only it needs, in order


@dataclass(frozen=True)
class Marked:
    """The regions of a computation, and what of it is written whatever becomes of them."""

    regions: dict[int, Region]  # by id of the instruction that they end with
    needed: frozenset[int]  # ids
    left: int  # number of regions that no operator can stand for


def find(computation: Message, *, whole: bool) -> Marked:
    """The regions of a computation that an operator can stand for.

    Args:
        whole: there are no such operators.
    """
    by_id = {each.id: each for each in computation.instructions}
    entries, insides, left = {}, {}, 0
    for each in computation.instructions:
        if _mark(each, EXIT) and not whole:
            found = _inside(each, by_id)
            if found is None:
                left += 1
            else:
                entries[each.id], insides[each.id] = found
    needed = _reached(computation.root_id, by_id, entries)
    regions = {
        end: Region(
            by_id[end].frontend_attributes.map[EXIT],
            json.loads(by_id[end].frontend_attributes.map[SETTINGS]),
            entries[end],
            tuple(number for number in by_id if number in inside - needed),
        )
        for end, inside in insides.items()
    }
    return Marked(regions, frozenset(needed), left)


def _inside(end: Message, by_id: dict[int, Message]) -> tuple[int, set[int]] | None:
    """A region's entry and what lies between, if that is arithmetic on what the entry gives."""
    name, entry, inside = _mark(end, EXIT), None, set()
    waiting = list(end.operand_ids)
    while waiting:
        each = by_id[waiting.pop()]
        if each.id in inside or each.id == entry:
            continue
        if _mark(each, ENTRY) == name:
            if entry is not None:
                return None
            entry = each.id
            continue
        if each.opcode in _FOREIGN or each.opcode.startswith(_COLLECTIVES):
            return None
        inside.add(each.id)
        waiting.extend(each.operand_ids)
    return None if entry is None else (entry, inside)


def _mark(each: Message, which: str) -> str | None:
    """A mark's region; XLA gives its attributes to what unpacks it too."""
    return each.frontend_attributes.map.get(which) if each.opcode == "opt-barrier" else None


def _reached(root: int, by_id: dict[int, Message], entries: dict[int, int]) -> set[int]:
    """What a computation's result is made of, with regions that need their entry only."""
    found: set[int] = set()
    waiting = [root]
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting.extend([entries[number]] if number in entries else by_id[number].operand_ids)
    return found
