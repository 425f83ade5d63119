"""Processes of this host that compute for this one, such as the ranks of MindSpore.

A backend that starts such processes registers them, so that a watchdog can look after them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

HAS_ENDED = "has ended"  # the reason why a rank does not run that has ended, by itself or killed


class ProcessGroup(Protocol):
    """Processes that compute for this one, by rank."""

    def not_running(self) -> dict[int, str]:
        """Return the ranks that do not run, with the reason: HAS_ENDED, or how it is stopped."""
        ...

    def write_stacks(self, directory: Path) -> None:
        """Let every rank that runs write its Python stacks to rank-N.txt in a directory."""
        ...

    def kill(self) -> None:
        """Kill all processes."""
        ...


groups: list[ProcessGroup] = []  # of this process


def not_running() -> dict[int, str]:
    """Return the ranks of this host that do not run, with the reason."""
    return {rank: reason for group in groups for rank, reason in group.not_running().items()}


def write_stacks(directory: Path) -> None:
    """Let every rank process of this host write its Python stacks to a directory."""
    for group in groups:
        group.write_stacks(directory)


def kill() -> None:
    """Kill the rank processes of this host."""
    for group in list(groups):  # a group that is killed leaves the list
        group.kill()
