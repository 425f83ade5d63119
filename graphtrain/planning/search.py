"""Search all strategies for a model and a batch on a target, ranked by estimate.

Sizes that do not divide are never built. Strategies that do not fit in memory are not ranked; the
result contains the reason.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphtrain.config.schema import Program
from graphtrain.cost_model.assessment import StepTime
from graphtrain.cost_model.native_equivalent import with_native_model
from graphtrain.cost_model.time import OVERLAPPED_AXES, crosses_hosts
from graphtrain.errors import PlanError
from graphtrain.planning.candidates import (
    MAX_TENSOR,
    MIN_CONTEXT_PARALLEL_LENGTH,
    Candidate,
    SearchOptions,
    candidates,
    divisors,
    indivisible_size,
)
from graphtrain.planning.formats import format_seconds

FAMILIES = ("tensor", "stage", "context", "fsdp", "zero", "sequence", "schedule", "remat")


@dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    ranked: tuple[Candidate, ...]  # candidates that fit, fastest first
    rejected: dict[str, str]  # by choice, as "tensor 16": why its best candidate is not the fastest
    considered: int  # number of candidates
    seconds: float  # duration of the search


def search(program: Program, keep: int = 20) -> SearchResult:
    """Rank the strategies for a program's model, batch and target, without compiling.

    Args:
        program: the program whose strategy is varied.
        keep: number of strategies to return; of several with equal numbers, only the first.

    Raises:
        LoweringError: unknown target.
        PlanError: no strategy divides the model and the batch, the model is a mixture of experts,
            or it is a PyTorch model whose sizes are unknown.
    """
    start_time, original_program, imported = time.perf_counter(), program, None
    program = with_native_model(program)
    if program.model.moe is not None:
        raise PlanError(
            "graphtrain plan search supports only dense models, and program.model is a mixture of "
            "experts; use graphtrain plan with a mesh and rules of your choice"
        )
    choices = SearchOptions()
    if program is not original_program:
        # a native model of the same sizes stands in for a PyTorch model
        from graphtrain.planning.imported import TorchSearch

        imported = TorchSearch.of(original_program)
        choices = imported.choices
    fitting: list[Candidate] = []
    best_of: dict[tuple[str, str], Candidate] = {}
    considered = 0
    for candidate in candidates(program, choices=choices):
        considered += 1
        if candidate.memory.fits:
            fitting.append(candidate)
        for family in FAMILIES:
            member = family, candidate.choice(family)
            if member not in best_of or _is_better(candidate, best_of[member]):
                best_of[member] = candidate
    if not considered:
        raise PlanError(
            f"no strategy divides batch.global_batch_size = {program.batch.global_batch_size} and "
            "the model over "
            f"{program.target}; choose a batch that is a multiple of the number of devices"
        )
    best_candidates = _folded(sorted(fitting, key=lambda candidate: candidate.rank))[:keep]
    rejected = _rejection_reasons(program, best_candidates[0] if best_candidates else None, best_of)
    if imported is not None:
        rejected |= imported.not_tried
        best_candidates = [imported.with_torch_model(candidate) for candidate in best_candidates]
    return SearchResult(
        tuple(best_candidates), rejected, considered, time.perf_counter() - start_time
    )


def _folded(ranked: Sequence[Candidate]) -> list[Candidate]:
    """Fold candidates whose printed numbers are equal into the first of them."""
    groups: dict[tuple[str, ...], list[Candidate]] = {}
    for candidate in ranked:
        groups.setdefault(candidate.figures, []).append(candidate)
    return [replace(first, equal=len(others)) for first, *others in groups.values()]


def _is_better(candidate: Candidate, incumbent: Candidate) -> bool:
    """Return whether `candidate` is better: fits, or is faster, or is smaller if neither fits."""
    if candidate.memory.fits != incumbent.memory.fits:
        return candidate.memory.fits
    if candidate.memory.fits:
        return candidate.rank < incumbent.rank
    return candidate.memory.peak < incumbent.memory.peak


def _rejection_reasons(
    program: Program, winner: Candidate | None, best_of: dict[tuple[str, str], Candidate]
) -> dict[str, str]:
    reasons = {}
    for (family, choice), best in best_of.items():
        if winner is None or winner.choice(family) != choice:
            reasons[f"{family} {choice}"] = _reason(winner, best)
    devices = next(iter(best_of.values())).mesh.devices  # the same for every candidate
    for tensor in divisors(devices, MAX_TENSOR):
        if size := indivisible_size(program.model, tensor):
            reasons[f"tensor {tensor}"] = f"does not divide {size}"
    if program.batch.seq_len < MIN_CONTEXT_PARALLEL_LENGTH:
        reasons["context"] = (
            f"not tried: sequences have fewer than {MIN_CONTEXT_PARALLEL_LENGTH:,} tokens"
        )
    return reasons


def _reason(winner: Candidate | None, best: Candidate) -> str:
    if best.time is None:
        memory = best.memory
        parts = {
            name: getattr(memory, name)
            for name in ("parameters", "optimizer", "gradients", "activations", "temporaries")
        }
        largest = max(parts, key=lambda name: parts[name])
        return (
            f"nothing fits: the smallest needs {memory.peak / 1e9:.1f} GB of "
            f"{memory.capacity / 1e9:.0f} GB; largest part: {largest} {parts[largest] / 1e9:.1f} GB"
        )
    assert winner is not None and winner.time is not None
    if best.rank == winner.rank:
        return f"no difference by estimate, with {best.mesh}"
    seconds = f"{format_seconds(best.time.total)} s per step"
    if best.rank[0] == winner.rank[0]:
        return f"also {seconds}, with {best.mesh}{_tie_breaker(best, winner)}"
    times = f"{seconds} instead of {format_seconds(winner.time.total)} s, with {best.mesh}"
    return f"{times}: {_largest_excess(best, winner.time)}"


def _tie_breaker(best: Candidate, winner: Candidate) -> str:
    """Describe why a candidate with the same step time ranks lower."""
    sending, sent = best.rank[1] - winner.rank[1], best.sent_bytes - winner.sent_bytes
    if sending > 0:
        return f", if all communication overlaps, but it sends for {format_seconds(sending)} s more"
    if sent > 0:
        return f", but a device sends {sent / 1e6:,.1f} MB more"
    return f", but it needs {(best.memory.peak - winner.memory.peak) / 1e6:,.1f} MB more"


def _largest_excess(best: Candidate, winner_time: StepTime) -> str:
    """Describe the part of a step whose time exceeds the winner's the most."""
    time = best.time
    assert time is not None
    compute, memory, bubble = time.compute or 0.0, time.memory or 0.0, time.bubble or 0.0
    excess = {
        f"compute {format_seconds(compute)} s": compute - (winner_time.compute or 0.0),
        f"memory traffic {format_seconds(memory)} s": memory - (winner_time.memory or 0.0),
        f"pipeline bubble {format_seconds(bubble)} s": bubble - (winner_time.bubble or 0.0),
    }
    overlappable: dict[str, float] = {}
    for axes, known in time.communication.items():
        names, seconds = tuple(axes.split("+")), known or 0.0
        if set(names) <= OVERLAPPED_AXES:
            overlappable[axes] = seconds
            continue
        crosses = " across hosts" if crosses_hosts(names, best.mesh, best.program.target) else ""
        label = f"communication over {axes}{crosses} {format_seconds(seconds)} s"
        excess[label] = seconds - (winner_time.communication.get(axes) or 0.0)
    exposed = sum(overlappable.values()) - (time.overlapped or 0.0)
    if overlappable:
        slowest = max(overlappable, key=lambda axes: overlappable[axes])
        excess[f"communication over {slowest} without overlap {format_seconds(exposed)} s"] = (
            exposed
        )
    label = max(excess, key=lambda entry: excess[entry])
    return f"{label} of {format_seconds(time.total)} s"
