"""Why other strategies of a search rank lower than its winner."""

from __future__ import annotations

from collections.abc import Mapping

from graphtrain.config.schema import Program
from graphtrain.cost_model.assessment import StepTime
from graphtrain.cost_model.time import OVERLAPPED_AXES, crosses_hosts
from graphtrain.planning.candidate import Candidate
from graphtrain.planning.candidates import (
    MAX_TENSOR,
    MIN_CONTEXT_PARALLEL_LENGTH,
    divisors_up_to,
    indivisible_size,
)
from graphtrain.planning.formats import format_seconds

_MEMORY_PARTS = "parameters", "frozen", "optimizer", "gradients", "activations", "temporaries"


def rejection_reasons(
    program: Program,
    winner: Candidate | None,
    best_of: Mapping[tuple[str, str], Candidate],
) -> dict[str, str]:
    """Return why the best strategy with each choice, as "tensor 16", is not the fastest.

    Args:
        program: the program, with a native model.
        winner: the fastest strategy; None if none fits.
        best_of: the best strategy by family and choice, all of one global batch.
    """
    reasons = {}
    for (family, choice), best in best_of.items():
        if winner is None or winner.choice(family) != choice:
            reasons[f"{family} {choice}"] = _reason(winner, best)
    devices = next(iter(best_of.values())).mesh.devices  # the same for every candidate
    for tensor in divisors_up_to(devices, MAX_TENSOR):
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
        parts = {name: getattr(memory, name) for name in _MEMORY_PARTS}
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
    sending, sent = best.rank[2] - winner.rank[2], best.sent_bytes - winner.sent_bytes
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
    host = time.host or 0.0
    excess = {
        f"compute {format_seconds(compute)} s": compute - (winner_time.compute or 0.0),
        f"memory traffic {format_seconds(memory)} s": memory - (winner_time.memory or 0.0),
        f"pipeline bubble {format_seconds(bubble)} s": bubble - (winner_time.bubble or 0.0),
        f"transfers to host memory {format_seconds(host)} s": host - (winner_time.host or 0.0),
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
