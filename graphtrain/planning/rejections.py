"""Why other strategies of a search rank lower than its winner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphtrain.config.schema import Program
from graphtrain.cost_model.communication_time import crosses_hosts
from graphtrain.cost_model.time import OVERLAPPED_AXES
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
    compiled: Sequence[Candidate] = (),
) -> dict[str, str]:
    """Return why the best strategy with each choice, as "tensor 16", is not the fastest.

    A compiled step is compared with the winner's compiled step, an estimate with the estimate of
    the winner.

    Args:
        program: the program, with a native model.
        winner: the fastest strategy; None if none fits.
        best_of: the best estimate by family and choice, all of one global batch.
        compiled: strategies of compile_best, best first; the first with a choice stands for it.
    """
    reasons = {}
    for (family, choice), estimated in best_of.items():
        if winner is not None and winner.choice(family) == choice:
            continue
        alike = (
            one
            for one in compiled
            if one.choice(family) == choice and one.relative_batch == estimated.relative_batch
        )
        reasons[f"{family} {choice}"] = _reason(winner, next(alike, estimated))
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
    if best.refused:
        return f"refused, with {best.mesh}: {best.note}"
    if best.memory.compiler_out_of_memory:
        return f"compiled: does not fit, with {best.mesh}: the compiler found no way to fit it"
    if not best.memory.fits:
        return _excess_memory(best)
    if winner is None:
        return f"fits by estimate, with {best.mesh}, but was not compiled"
    if not best.is_compiled:
        return _slower(winner.estimated or winner, best)
    if winner.is_timed and not best.is_timed:
        return f"compiled, with {best.mesh}: {best.note}"
    return f"compiled: {_slower(winner, best)}"


def _excess_memory(best: Candidate) -> str:
    """Describe the memory of a strategy that does not fit."""
    memory = best.memory
    capacity = memory.capacity / 1e9
    needed = f"{memory.peak / 1e9:.1f} GB of {capacity:.{0 if capacity >= 10 else 2}f} GB"
    parts = {name: getattr(memory, name) for name in _MEMORY_PARTS}
    largest = max(parts, key=lambda name: parts[name])
    largest_part = f"largest part: {largest} {parts[largest] / 1e9:.1f} GB"
    if best.is_compiled:
        return f"compiled: does not fit, with {best.mesh}: needs {needed}; {largest_part}"
    return f"nothing fits: the smallest needs {needed}; {largest_part}"


def _slower(winner: Candidate, best: Candidate) -> str:
    """Describe why a strategy ranks after the winner, both compiled or both by estimate."""
    assert winner.time is not None and best.time is not None
    if best.rank == winner.rank:
        return f"no difference{'' if best.is_compiled else ' by estimate'}, with {best.mesh}"
    seconds = f"{format_seconds(best.time.total)} s"
    of_winner = f"{format_seconds(winner.time.total)} s"
    if best.rank < winner.rank:  # only of estimates: the compiled winner is the fastest
        why = f"was not compiled{f': {best.note}' if best.note else ''}"
        return f"{seconds} instead of {of_winner} by estimate, with {best.mesh}, but {why}"
    if best.rank[0] == winner.rank[0]:
        return f"also {seconds} per step, with {best.mesh}{_tie_breaker(best, winner)}"
    times = f"{seconds} per step instead of {of_winner}, with {best.mesh}"
    return f"{times}: {_largest_excess(best, winner)}"


def _tie_breaker(best: Candidate, winner: Candidate) -> str:
    """Describe why a candidate with the same step time ranks lower."""
    sending, sent = best.rank[2] - winner.rank[2], best.sent_bytes - winner.sent_bytes
    if sending > 0:
        return f", if all communication overlaps, but it sends for {format_seconds(sending)} s more"
    if sent > 0:
        return f", but a device sends {sent / 1e6:,.1f} MB more"
    return f", but it needs {(best.memory.peak - winner.memory.peak) / 1e6:,.1f} MB more"


def _largest_excess(best: Candidate, winner: Candidate) -> str:
    """Describe the part of a step whose time exceeds the winner's the most."""
    time, winner_time = best.time, winner.time
    assert time is not None and winner_time is not None
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
    recomputed = _recomputed(best)
    is_cause = label.startswith("compute ") and recomputed != _recomputed(winner)
    return f"{label} of {format_seconds(time.total)} s{f' ({recomputed})' if is_cause else ''}"


def _recomputed(strategy: Candidate) -> str:
    """Describe what the backward pass of a strategy computes again."""
    program = strategy.program
    if program.stages is not None and program.pipeline.recomputes_stages(program.model.remat):
        return "stages are recomputed"
    return f"remat {program.model.remat}"
