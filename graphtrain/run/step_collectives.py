"""Collectives of a step in which a rank may wait for another one, in words for messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MAX_ARRAYS = 2  # arrays that a description names


def largest_collective(record: Mapping[str, Any]) -> str:
    """Describe the collective of a program that sends most; empty without any.

    Which collective a rank waits in is known to the device only: programs overlap them.
    """
    collectives = record.get("collectives")
    if not collectives:
        return ""
    largest = collectives[0]  # they are sorted by the bytes that they send
    axes = ", ".join(largest.get("axes", ()))
    return f"probably in one of its collectives (the largest: {largest['op']} over {axes})"


def first_collective(record: Mapping[str, Any], processes: int) -> str:
    """Describe the collective in which the others wait for a process that has not begun the step.

    It is the first one between processes in the order of the compiled schedule. Empty if there is
    none, or the program has no schedule.
    """
    mesh: Mapping[str, int] = record.get("mesh", {})
    devices = 1
    distance = {}  # between neighbours along an axis; the last axis is that of the nearest devices
    for axis in reversed(list(mesh)):
        distance[axis] = devices
        devices *= mesh[axis]
    per_process = devices // processes
    for each in record.get("first_collectives", ()):
        if any(distance[axis] * mesh[axis] > per_process for axis in each.get("axes", ())):
            moved = " and ".join(each.get("arrays", ())[:_MAX_ARRAYS])
            return f"{each['op']} over {', '.join(each['axes'])}{f' of {moved}' if moved else ''}"
    return ""
