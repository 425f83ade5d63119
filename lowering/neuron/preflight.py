"""Preflight: find what neuronx-cc would reject in a module before hours of compiling.

Findings have the compiler's own error codes. `rules` checks single instructions; this module checks
limits of the complete program.
Source: AWS Neuron documentation, compiler error codes and limits, SDK 2.32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lowering.errors import LoweringError, OutOfMemory
from lowering.hlo.proto import TYPES, Message, array_bytes, read_module
from lowering.machine.target import Target
from lowering.neuron.compiler import OUT_OF_MEMORY_CODES
from lowering.neuron.findings import PreflightFinding, PreflightModule, format_findings
from lowering.neuron.instructions import UNDERESTIMATE_FACTOR, InstructionCount, estimate
from lowering.neuron.rules import RULES

_DEFAULT_INSTRUCTION_LIMIT = 5_000_000  # limit of a NEFF, unless a flag changes it
_LIMIT_FLAG = "--internal-max-instruction-limit"  # used in AWS's AXLearn tutorial
_LOGICAL_CORES = re.compile(r"(--logical-nc-config|--lnc|-lnc)[ =](\d+)")
# Limit of instructions of one operation. Undocumented; from reports of NCC_EXTP003 on trn1, trn2.
_OPERATION_LIMITS = {"trn1": 150_000}
_DEFAULT_OPERATION_LIMIT = 300_000
_MAX_COMMUNICATORS = 16  # limit of different groups of ranks in a NEFF
_LARGEST_MODULE = 2**31 - 1  # bytes; limit of a protocol buffer


def check(
    hlo: bytes,
    sources: Mapping[int, str],
    graph: str,
    target: Target,
    flags: Sequence[str] = (),
    *,
    peak: int = 0,
) -> dict[str, Any]:
    """Raise an error for a normalised module that the compiler would reject.

    Args:
        hlo: the normalised module.
        sources: line of the model's code by instruction id.
        graph: name of the graph, for messages.
        target: machine to compile for.
        flags: the compiler's flags.
        peak: bytes per device that XLA would need on a CPU; more than the target's memory is a
            warning.

    Returns:
        Entries for the record: estimated instructions, their limit, and warnings.

    Raises:
        OutOfMemory: the inputs alone do not fit the device, and there is no other error.
        LoweringError: the compiler would reject the module; the message lists every error with
            the line of the model that causes it.
    """
    module = PreflightModule(read_module(hlo), target)
    count, limit = estimate(module.proto), instruction_limit(flags)
    findings = _findings(module, count, len(hlo), flags)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors and all(finding.code in OUT_OF_MEMORY_CODES for finding in errors):
        raise OutOfMemory(graph, target, "; ".join(format_findings(errors, sources)))
    if errors:
        lines = "\n".join(f"  {line}" for line in format_findings(errors, sources))
        raise LoweringError(f"neuronx-cc would reject {graph}, so it was not started:\n{lines}")
    warnings = [finding for finding in findings if finding.severity == "warning"]
    if peak > target.memory_bytes:
        warnings.append(_memory_warning(peak, target))
    return {
        "instructions": count.unrolled,
        "instructions_once": count.loops_once,
        "instruction_limit": limit,
        "warnings": format_findings(warnings, sources),
    }


def preflight(hlo: bytes, target: Target, flags: Sequence[str] = ()) -> list[PreflightFinding]:
    """Return all errors and warnings for a normalised module."""
    module = PreflightModule(read_module(hlo), target)
    return _findings(module, estimate(module.proto), len(hlo), flags)


def instruction_limit(flags: Sequence[str]) -> int:
    """Return the maximum number of instructions of a NEFF, which a flag can change."""
    limits = re.findall(rf"{_LIMIT_FLAG}[ =](\d+)", " ".join(flags))
    return int(limits[-1]) if limits else _DEFAULT_INSTRUCTION_LIMIT


def _findings(
    module: PreflightModule, count: InstructionCount, size: int, flags: Sequence[str]
) -> list[PreflightFinding]:
    findings = [
        finding
        for instruction in module.instructions.values()
        for rule in RULES
        for finding in rule(instruction, module)
    ]
    findings += _cores(module, flags)
    findings += _size(size)
    findings += _instructions(module, count, instruction_limit(flags))
    findings += _communicators(module)
    findings += _inputs(module)
    return findings


def _cores(module: PreflightModule, flags: Sequence[str]) -> Iterator[PreflightFinding]:
    core_flags = [match[0] for match in _LOGICAL_CORES.finditer(" ".join(flags)) if match[2] != "1"]
    if module.machine == "trn1" and core_flags:
        problem = f"trn1 cannot combine cores into one logical core, as {core_flags[-1]} requests"
        yield PreflightFinding("EARG001", 0, problem, "remove that flag from NEURON_CC_FLAGS")


def _size(size: int) -> Iterator[PreflightFinding]:
    if size > _LARGEST_MODULE:
        problem = f"the module has {size:,} bytes; the limit is 2 GiB"
        yield PreflightFinding(
            "EXTP004", 0, problem, "scan over layers, and pass constants as inputs"
        )


def _instructions(
    module: PreflightModule, count: InstructionCount, limit: int
) -> Iterator[PreflightFinding]:
    remedy = (
        "shard the model over more devices, use fewer sequences per step, or raise the limit: "
        f"NEURON_CC_FLAGS={_LIMIT_FLAG}=N"
    )
    if count.loops_once > limit:
        problem = (
            f"about {count.loops_once:,} instructions with no loop unrolled (estimate); the limit "
            "is "
            f"{limit:,}"
        )
        yield PreflightFinding("EVRF007", 0, problem, remedy)
    elif count.unrolled * UNDERESTIMATE_FACTOR > limit:
        problem = (
            f"about {count.unrolled:,} instructions (estimate; published counts were "
            f"3 to {UNDERESTIMATE_FACTOR} times the estimate); the limit is {limit:,}"
        )
        yield PreflightFinding("EVRF007", 0, problem, remedy, "warning")
    operation_limit = _OPERATION_LIMITS.get(module.machine, _DEFAULT_OPERATION_LIMIT)
    if count.largest > operation_limit:
        name = module.instructions[count.largest_id].name
        problem = (
            f"{name} alone takes about {count.largest:,} instructions; the limit is "
            f"{operation_limit:,}"
        )
        yield PreflightFinding(
            "EXTP003",
            count.largest_id,
            problem,
            "shard it over more devices, or split it",
            "warning",
        )


def _communicators(module: PreflightModule) -> Iterator[PreflightFinding]:
    groups = {
        tuple(tuple(group.replica_ids) for group in instruction.replica_groups)
        for instruction in module.instructions.values()
        if instruction.replica_groups
    }
    if len(groups) > _MAX_COMMUNICATORS:
        problem = f"{len(groups)} different groups of ranks; the limit is {_MAX_COMMUNICATORS}"
        yield PreflightFinding("", 0, problem, "use fewer mesh axes", "warning")


def _inputs(module: PreflightModule) -> Iterator[PreflightFinding]:
    input_bytes = sum(_bytes(shape) for shape in module.proto.host_program_shape.parameters)
    if input_bytes > module.memory:
        problem = (
            f"the inputs alone need {input_bytes / 1e9:.1f} GB per device; a device has "
            f"{module.memory / 1e9:.1f} GB"
        )
        yield PreflightFinding("EOOM001", 0, problem, "shard the state over more devices")


def _memory_warning(peak: int, target: Target) -> PreflightFinding:
    problem = (
        f"XLA on a CPU would need {peak / 1e9:.1f} GB per device; a device has "
        f"{target.memory_bytes / 1e9:.1f} GB"
    )
    remedy = "if neuronx-cc needs as much, apply a change that graphtrain plan proposes"
    return PreflightFinding("EOOM001", 0, problem, remedy, "warning")


def _bytes(shape: Message) -> int:
    if shape.element_type == TYPES["tuple"]:
        return sum(map(_bytes, shape.tuple_shapes))
    return array_bytes(shape)
