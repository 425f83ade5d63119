"""Lowered: the traced, sharded program, which is the compiler's input."""

from dataclasses import dataclass
from typing import Any

from lowering.machine.target import Target
from sharding_rules.plan import Plan


@dataclass(frozen=True)
class Lowered:
    """StableHLO of one graph with its shardings, and facts for its record."""

    name: str
    text: str
    plan: Plan
    target: Target
    facts: dict[str, Any]  # for the record: paths, layouts and donation of inputs and outputs
    options: dict[str, Any]  # compiler options
    handle: Any  # backend-specific object, used by the backend's compile()
