"""Lowered: the traced, sharded program: what the compiler is given."""

from dataclasses import dataclass
from typing import Any

from lowering.machine.target import Target
from sharding_rules.plan import Plan


@dataclass(frozen=True)
class Lowered:
    """One graph's StableHLO with its shardings, and what its record will say."""

    name: str
    text: str
    plan: Plan
    target: Target
    facts: dict[str, Any]  # for the record: paths, layouts and donations of inputs and outputs
    options: dict[str, Any]  # for the compiler
    handle: Any  # the backend's own object, which compile() takes
