"""Marked regions in one device's HLO, and which of them a fused operator can replace.

The instructions inside a region are omitted if nothing else reads them and if they are as traced:
arithmetic on the values at the region's entry. If the partitioner has inserted a collective, or
made the region depend on the device, it is translated like any other code.
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
    """One marked region of a computation."""

    name: str
    settings: dict[str, Any]
    entry: int  # id of its first instruction
    instructions: tuple[int, ...]  # ids of instructions that only the region needs, in order


@dataclass(frozen=True)
class RegionsOf:
    """The regions of a computation, and the instructions that are needed in any case."""

    regions: dict[int, Region]  # by id of their last instruction
    needed: frozenset[int]  # ids of instructions that are needed even if all regions are replaced
    unreplaced: int  # number of regions that no operator can replace


def find(computation: Message, *, ignore_regions: bool) -> RegionsOf:
    """Return the regions of a computation that an operator can replace.

    Args:
        computation: an HLO computation.
        ignore_regions: replace no region, since the device has no such operators.
    """
    by_id = {instruction.id: instruction for instruction in computation.instructions}
    entries, insides, unreplaced = {}, {}, 0
    for instruction in computation.instructions:
        if _mark(instruction, EXIT) and not ignore_regions:
            entry_and_inside = _inside(instruction, by_id)
            if entry_and_inside is None:
                unreplaced += 1
            else:
                entries[instruction.id], insides[instruction.id] = entry_and_inside
    needed = _reachable(computation.root_id, by_id, entries)
    regions = {
        end: Region(
            by_id[end].frontend_attributes.map[EXIT],
            json.loads(by_id[end].frontend_attributes.map[SETTINGS]),
            entries[end],
            tuple(instruction_id for instruction_id in by_id if instruction_id in inside - needed),
        )
        for end, inside in insides.items()
    }
    return RegionsOf(regions, frozenset(needed), unreplaced)


def _inside(end: Message, by_id: dict[int, Message]) -> tuple[int, set[int]] | None:
    """Return a region's entry and its inside, if that is only arithmetic on the entry's values."""
    name, entry, inside = _mark(end, EXIT), None, set()
    waiting = list(end.operand_ids)
    while waiting:
        instruction = by_id[waiting.pop()]
        if instruction.id in inside or instruction.id == entry:
            continue
        if _mark(instruction, ENTRY) == name:
            if entry is not None:
                return None
            entry = instruction.id
            continue
        if instruction.opcode in _FOREIGN or instruction.opcode.startswith(_COLLECTIVES):
            return None
        inside.add(instruction.id)
        waiting.extend(instruction.operand_ids)
    return None if entry is None else (entry, inside)


def _mark(instruction: Message, which: str) -> str | None:
    """Return the region's name in a mark, a barrier: XLA copies attributes to its users too."""
    return (
        instruction.frontend_attributes.map.get(which)
        if instruction.opcode == "opt-barrier"
        else None
    )


def _reachable(root: int, by_id: dict[int, Message], entries: dict[int, int]) -> set[int]:
    """Return the ids that a computation's result depends on; regions depend on their entry only."""
    reachable_ids: set[int] = set()
    waiting = [root]
    while waiting:
        instruction_id = waiting.pop()
        if instruction_id not in reachable_ids:
            reachable_ids.add(instruction_id)
            waiting.extend(
                [entries[instruction_id]]
                if instruction_id in entries
                else by_id[instruction_id].operand_ids
            )
    return reachable_ids
