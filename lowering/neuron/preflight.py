"""What neuronx-cc would refuse in a module, told before hours of compiling, in its own codes.

Rules of single instructions are in `rules`; here are those of a module as a whole.
Source: AWS Neuron documentation, compiler error codes and limits, SDK 2.32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lowering.errors import LoweringError, OutOfMemory
from lowering.hlo.proto import TYPES, Message, array_bytes, read_module
from lowering.machine.target import Target
from lowering.neuron.compiler import TOO_LITTLE_MEMORY
from lowering.neuron.findings import Finding, Module, told
from lowering.neuron.instructions import TOO_LOW, Instructions, estimate
from lowering.neuron.rules import RULES

_INSTRUCTIONS = 5_000_000  # of a NEFF, unless a flag says otherwise
_LIMIT_FLAG = "--internal-max-instruction-limit"  # as AWS's tutorial of AXLearn raises it
_LOGICAL_CORES = re.compile(r"(--logical-nc-config|--lnc|-lnc)[ =](\d+)")
# Of one operation; no page says it, reports of NCC_EXTP003 from trn1 and trn2 do.
_OF_ONE_OPERATION = {"trn1": 150_000}
_OF_ONE_OPERATION_ELSEWHERE = 300_000
_COMMUNICATORS = 16  # groups of ranks in a NEFF
_LARGEST_MODULE = 2**31 - 1  # bytes that a protocol buffer may have


def check(
    hlo: bytes,
    sources: Mapping[int, str],
    graph: str,
    target: Target,
    flags: Sequence[str] = (),
    *,
    peak: int = 0,
) -> dict[str, Any]:
    """Refuse a normalised module that the compiler would refuse, with the lines it comes from.

    Args:
        peak: bytes on a device that XLA would need on a CPU, of which too many are a warning.

    Returns:
        For the record: the estimated instructions, their limit, and warnings.

    Raises:
        OutOfMemory: the inputs alone do not fit the device, and nothing else is wrong.
        LoweringError: with every error.
    """
    module = Module(read_module(hlo), target)
    count, limit = estimate(module.proto), instruction_limit(flags)
    found = _findings(module, count, len(hlo), flags)
    errors = [one for one in found if one.severity == "error"]
    if errors and all(one.code in TOO_LITTLE_MEMORY for one in errors):
        raise OutOfMemory(graph, target, "; ".join(told(errors, sources)))
    if errors:
        lines = "\n".join(f"  {line}" for line in told(errors, sources))
        raise LoweringError(f"neuronx-cc would refuse {graph}, and was not asked:\n{lines}")
    warnings = [one for one in found if one.severity == "warning"]
    if peak > target.memory_bytes:
        warnings.append(_too_little_memory(peak, target))
    return {
        "instructions": count.unrolled,
        "instructions_once": count.once,
        "instruction_limit": limit,
        "warnings": told(warnings, sources),
    }


def preflight(hlo: bytes, target: Target, flags: Sequence[str] = ()) -> list[Finding]:
    """Everything that the compiler would refuse or change in a normalised module."""
    module = Module(read_module(hlo), target)
    return _findings(module, estimate(module.proto), len(hlo), flags)


def instruction_limit(flags: Sequence[str]) -> int:
    """How many instructions a NEFF may have; flags may raise it."""
    asked = re.findall(rf"{_LIMIT_FLAG}[ =](\d+)", " ".join(flags))
    return int(asked[-1]) if asked else _INSTRUCTIONS


def _findings(
    module: Module, count: Instructions, size: int, flags: Sequence[str]
) -> list[Finding]:
    found = [
        finding
        for each in module.instructions.values()
        for rule in RULES
        for finding in rule(each, module)
    ]
    found += _cores(module, flags)
    found += _size(size)
    found += _instructions(module, count, instruction_limit(flags))
    found += _communicators(module)
    found += _inputs(module)
    return found


def _cores(module: Module, flags: Sequence[str]) -> Iterator[Finding]:
    asked = [found[0] for found in _LOGICAL_CORES.finditer(" ".join(flags)) if found[2] != "1"]
    if module.machine == "trn1" and asked:
        what = f"a trn1 has no logical cores of several, as {asked[-1]} says"
        yield Finding("EARG001", 0, what, "take that out of NEURON_CC_FLAGS")


def _size(size: int) -> Iterator[Finding]:
    if size > _LARGEST_MODULE:
        what = f"the module has {size:,} bytes, and 2 GiB is the most"
        yield Finding("EXTP004", 0, what, "scan the layers, and give constants as inputs")


def _instructions(module: Module, count: Instructions, limit: int) -> Iterator[Finding]:
    less = (
        "split the model over more devices, take fewer sequences in a step, or raise the limit: "
        f"NEURON_CC_FLAGS={_LIMIT_FLAG}=N"
    )
    if count.once > limit:
        what = (
            f"about {count.once:,} instructions with no loop unrolled (an estimate), and the limit "
            f"is {limit:,}"
        )
        yield Finding("EVRF007", 0, what, less)
    elif count.unrolled * TOO_LOW > limit:
        what = (
            f"about {count.unrolled:,} instructions (an estimate; published counts were "
            f"3 to {TOO_LOW} times theirs), and the limit is {limit:,}"
        )
        yield Finding("EVRF007", 0, what, less, "warning")
    most = _OF_ONE_OPERATION.get(module.machine, _OF_ONE_OPERATION_ELSEWHERE)
    if count.largest > most:
        name = module.instructions[count.largest_id].name
        what = f"{name} alone takes about {count.largest:,} instructions; {most:,} is the limit"
        yield Finding(
            "EXTP003", count.largest_id, what, "split it over devices, or in pieces", "warning"
        )


def _communicators(module: Module) -> Iterator[Finding]:
    groups = {
        tuple(tuple(group.replica_ids) for group in each.replica_groups)
        for each in module.instructions.values()
        if each.replica_groups
    }
    if len(groups) > _COMMUNICATORS:
        what = f"{len(groups)} different groups of ranks, and {_COMMUNICATORS} is the most"
        yield Finding("", 0, what, "use fewer mesh axes", "warning")


def _inputs(module: Module) -> Iterator[Finding]:
    held = sum(_bytes(shape) for shape in module.proto.host_program_shape.parameters)
    if held > module.memory:
        what = f"the inputs alone take {held / 1e9:.1f} GB of {module.memory / 1e9:.1f} GB"
        yield Finding("EOOM001", 0, what, "split the state over more devices")


def _too_little_memory(peak: int, target: Target) -> Finding:
    what = f"XLA on a CPU would hold {peak / 1e9:.1f} GB of {target.memory_bytes / 1e9:.1f} GB"
    remedy = "if neuronx-cc does no better, see what graphtrain plan proposes"
    return Finding("EOOM001", 0, what, remedy, "warning")


def _bytes(shape: Message) -> int:
    if shape.element_type == TYPES["tuple"]:
        return sum(map(_bytes, shape.tuple_shapes))
    return array_bytes(shape)
