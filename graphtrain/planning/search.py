"""Search all strategies for a model and a batch on a target, ranked by estimate.

Sizes that do not divide are never built. Strategies that do not fit in memory are not ranked; the
result contains the reason.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

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
        keep: number of strategies to return.

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
    fitting.sort(key=lambda candidate: candidate.rank)
    best_candidates = fitting[:keep]
    rejected = _rejection_reasons(program, best_candidates[0] if best_candidates else None, best_of)
    if imported is not None:
        rejected |= imported.not_tried
        best_candidates = [imported.with_torch_model(candidate) for candidate in best_candidates]
    return SearchResult(
        tuple(best_candidates), rejected, considered, time.perf_counter() - start_time
    )


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
    times = f"{best.seconds:.3g} s per step instead of {winner.seconds:.3g} s, with {best.mesh}"
    if best.rank[0] == winner.rank[0]:
        extra_seconds = best.rank[1] - winner.rank[1]
        return (
            f"{times}: equal if all communication overlaps, but it takes "
            f"{extra_seconds:.2f} s longer"
        )
    return f"{times}: {_largest_excess(best, winner.time)}"


def _largest_excess(best: Candidate, winner_time: StepTime) -> str:
    """Describe the part of a step whose time exceeds the winner's the most."""
    time, total = best.time, best.seconds
    assert time is not None
    work = max(time.compute, time.memory)
    limit = "compute" if time.compute > time.memory else "memory traffic"
    excess = {
        f"{limit} {work:.2f} s": work - max(winner_time.compute, winner_time.memory),
        f"pipeline bubble {time.bubble:.2f} s": time.bubble - winner_time.bubble,
    }
    for axes, seconds in time.communication.items():
        names = tuple(axes.split("+"))
        if not set(names) <= OVERLAPPED_AXES:
            crosses = (
                " across hosts" if crosses_hosts(names, best.mesh, best.program.target) else ""
            )
            label = f"communication over {axes}{crosses} {seconds:.2f} s"
            excess[label] = seconds - winner_time.communication.get(axes, 0.0)
    overlappable = {
        axes: s for axes, s in time.communication.items() if set(axes.split("+")) <= OVERLAPPED_AXES
    }
    exposed = sum(overlappable.values()) - time.overlapped
    if overlappable:
        slowest = max(overlappable, key=lambda axes: overlappable[axes])
        excess[f"communication over {slowest} without overlap {exposed:.2f} s"] = exposed
    label = max(excess, key=lambda entry: excess[entry])
    return f"{label} of {total:.2f} s"
