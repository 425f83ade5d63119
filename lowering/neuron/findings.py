"""Findings of preflight, and the view of a module that its rules use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from lowering.hlo.proto import TYPE_NAMES, Message
from lowering.machine.target import Target


@dataclass(frozen=True)
class PreflightFinding:
    """A reason for the compiler to reject a module (error), or a possible problem (warning)."""

    code: str  # for example "EVRF004", without NCC_; empty if AWS publishes no code for it
    instruction: int  # id, by which the line of the model is found; 0 for the complete module
    problem: str
    remedy: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return (f"[NCC_{self.code}] " if self.code else "") + f"{self.problem}; {self.remedy}"


class PreflightModule:
    """HLO module with its computations and instructions by id."""

    def __init__(self, proto: Message, target: Target) -> None:
        self.proto = proto
        self.machine = str(target.specification["neuron"]["target"])
        self.memory = target.memory_bytes
        self.computations = {computation.id: computation for computation in proto.computations}
        self.instructions = {
            instruction.id: instruction
            for computation in proto.computations
            for instruction in computation.instructions
        }

    def operand(self, instruction: Message, index: int) -> Message:
        return self.instructions[instruction.operand_ids[index]]

    def called(self, instruction: Message) -> list[Message]:
        return [
            self.computations[computation_id]
            for computation_id in instruction.called_computation_ids
        ]

    def root(self, computation: Message) -> Message:
        return self.instructions[computation.root_id]


def type_of(instruction: Message) -> str:
    """Return an instruction's element type, as named in HLO text; empty if the type is unknown."""
    return TYPE_NAMES.get(instruction.shape.element_type, "")


def format_findings(findings: Iterable[PreflightFinding], sources: Mapping[int, str]) -> list[str]:
    """Format findings with the lines of the model that cause them, one for each line and code."""
    lines: dict[tuple[str, ...], str] = {}
    for finding in findings:
        source = sources.get(finding.instruction)
        key = (finding.code, source) if source else (str(finding),)
        lines.setdefault(key, f"{finding} (from {source})" if source else str(finding))
    return list(lines.values())
