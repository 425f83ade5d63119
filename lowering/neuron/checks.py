"""What neuronx-cc refuses in a module, told in its own codes before it is asked.

Source: AWS Neuron documentation, error codes, SDK 2.32.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lowering.errors import LoweringError
from lowering.neuron.proto import TYPES, Message, read_module

_LARGEST_ID = 2**31 - 1
_COMPLEX = (TYPES["c64"], TYPES["c128"])
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")


@dataclass(frozen=True)
class Violation:
    """One instruction that the compiler would refuse."""

    code: str  # as in "EVRF004"
    instruction: int  # its id, which leads to a line of the model's code
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"[NCC_{self.code}] {self.what}; {self.remedy}"


def check(hlo: bytes, sources: Mapping[int, str], graph: str) -> None:
    """Refuse a normalised module that the compiler would refuse, with the lines it comes from.

    Raises:
        LoweringError: with every distinct violation.
    """
    found = [
        f"{violation} (from {sources[violation.instruction]})"
        if violation.instruction in sources
        else str(violation)
        for violation in violations(read_module(hlo))
    ]
    if found:
        raise LoweringError(f"neuronx-cc would refuse {graph}: " + "; ".join(dict.fromkeys(found)))


def violations(module: Message) -> Iterator[Violation]:
    """Everything refused in a normalised module."""
    for computation in module.computations:
        for each in computation.instructions:
            yield from _of(each)


def _of(each: Message) -> Iterator[Violation]:
    if each.id > _LARGEST_ID:
        yield Violation(
            "EVRF001",
            each.id,
            f"the id of {each.name} is beyond 32 bits",
            "give the compiler a normalised module",
        )
    if any(each.shape.is_dynamic_dimension):
        yield Violation(
            "EMOD025", each.id, f"{each.name} has a dynamic size", "give every array a fixed size"
        )
    if each.opcode == "custom-call":
        yield Violation(
            "EHCA005",
            each.id,
            f"{each.name} calls {each.custom_call_target!r}, which the compiler does not know",
            "write it with ordinary operations",
        )
    if each.shape.element_type in _COMPLEX:
        yield Violation(
            "EVRF004", each.id, f"{each.name} is complex", "compute with pairs of real numbers"
        )
    if each.opcode in ("conditional", "triangular-solve", "cholesky", "fft"):
        yield Violation(
            "EVRF001",
            each.id,
            f"{each.name}: {each.opcode} is not supported",
            "select between values that are all computed",
        )
    if each.opcode in _COLLECTIVES and not each.replica_groups:
        yield Violation(
            "EVRF001",
            each.id,
            f"{each.name} names no replica groups",
            "give the compiler a normalised module",
        )
