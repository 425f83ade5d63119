"""Sums of gradients beside the last ticks of interleaved 1F1B, and the time of these ticks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from graphtrain.config.computed_once import computed_once
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.passes import Passes
from graphtrain.models.flops import Part
from sharding_rules.pipeline import CoolDownSums, WeightCopies, cool_down_sums, weight_copies

if TYPE_CHECKING:
    from lowering.hlo.collectives import Collective


@computed_once
def sums_beside_ticks(program: ResolvedProgram) -> CoolDownSums:
    """Return which gradients of a stage the last ticks of a pipeline sum; none without 1F1B."""
    stages, copies = program.stages, copies_of_weights(program)
    is_interleaved = program.pipeline.schedule == "1f1b" and program.pipeline.virtual_stages > 1
    if stages is None or not is_interleaved or not copies.all or program.model.moe is not None:
        return CoolDownSums(0, 0)
    return cool_down_sums(stages.stages, stages.rounds, stages.rows_per_chunk)


@computed_once
def overlaps_sums(program: ResolvedProgram) -> bool:
    """Return whether the compiler is expected to overlap these sums with their ticks.

    XLA for GPUs does (jax 0.10), unless the loop over a stage's layers has collectives: it has one
    of them in flight at a time. XLA for TPUs waits for a sum. What other compilers do is not known.
    """
    batch = copies_of_weights(program).batch
    others = (name for name in program.mesh.axes if name not in ("stage", *batch))
    return program.target.platform == "cuda" and program.mesh.size(tuple(others)) == 1


@computed_once
def copies_of_weights(program: ResolvedProgram) -> WeightCopies:
    """Return the mesh axes along which the weights of stages are replicated."""
    schedule, seq_len = program.pipeline.schedule, program.batch.seq_len
    return weight_copies(program.rules, program.mesh, schedule, seq_len)


def seconds_beyond_ticks(
    program: ResolvedProgram,
    collectives: Iterable[Collective],
    compute: Mapping[Part, float],
    seconds_of: Callable[[Iterable[Collective]], Mapping[str, float | None]],
) -> float:
    """Return how many seconds sums beside a pipeline's last ticks take longer than these ticks.

    Args:
        program: The program.
        collectives: Those of a step.
        compute: Seconds of products by part of the model, without those of the bubble.
        seconds_of: Returns the seconds of collectives by mesh axes; None where they are unknown.
    """
    beside = [one for one in collectives if one.beside_tick]
    if not beside:
        return 0.0
    passes, batch = Passes.of(program), program.batch
    layers = sum(seconds for part, seconds in compute.items() if part != "LM head")
    of_tick = layers / (batch.microbatches * program.pipeline.virtual_stages)
    # A backward pass has two products for each of the forward pass, and what it computes again.
    backward = 2 + passes.recomputes_stage + passes.recomputes_layers
    ticks = sums_beside_ticks(program).ticks * of_tick * backward / (1 + backward)
    return max(0.0, sum(seconds or 0.0 for seconds in seconds_of(beside).values()) - ticks)
