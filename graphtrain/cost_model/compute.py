"""FLOPs of a training step: by arithmetic, and as the compiled program has them."""

from __future__ import annotations

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.models.flops import (
    attention_flops_per_token,
    flops_per_token,
    step_flops_per_token,
)


def step_flops(program: ResolvedProgram, *, flash: bool, masked: bool = True) -> float:
    """Return the FLOPs of a step on all devices, including recomputation.

    Args:
        program: the program.
        flash: Whether attention is a kernel.
        masked: Count only the half of the scores that a kernel computes under a causal mask.
            Compiled programs are counted without the mask.
    """
    skips = flash and masked
    per_token = step_flops_per_token(program.settings, causal=skips)
    return (per_token + _recomputed(program, flash, skips)) * program.batch.tokens


def compiled_excess(
    program: ResolvedProgram, compiled: float, *, flash: bool, bubble: float = 0.0
) -> float:
    """Return the compiled FLOPs of a device over those that arithmetic expects.

    Below 1 the program has kernels whose FLOPs are not known.

    Args:
        program: the program.
        compiled: FLOPs of a device, read from the compiled program.
        flash: Whether attention is a kernel.
        bubble: Fraction of a pipeline's ticks in which a stage computes on padding.
    """
    expected = step_flops(program, flash=flash, masked=False) / program.target.devices
    return compiled * (1 - bubble) / expected


def _recomputed(program: ResolvedProgram, flash: bool, skips: bool) -> float:
    """Return the operations per token that the backward pass recomputes.

    Pipeline stages are recomputed from their input, and then by their own remat policy. A kernel's
    backward pass has seven products instead of four: it computes the scores, and the gradient of
    the probabilities, twice.

    Args:
        program: the program.
        flash: Whether attention is a kernel.
        skips: Whether the kernel's masked scores are left out.
    """
    model, length = program.model, program.batch.seq_len
    attention = attention_flops_per_token(model, length) / 3
    forward = flops_per_token(model, length) / 3 - 2 * model.embed * model.vocab
    by_policy = {"none": 0.0, "full": forward}.get(model.remat, attention)
    if flash:
        if skips:
            forward, attention = forward - attention / 2, attention / 2
        by_policy = 3 / 2 * attention + (forward if model.remat == "full" else 0.0)
    in_stages = program.mesh.axes.get("stage", 1) > 1
    if in_stages and (model.remat != "none" or program.pipeline.schedule == "1f1b"):
        return forward + (by_policy if model.remat != "full" else 0.0)
    return by_policy
