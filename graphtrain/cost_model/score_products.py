"""Products of attention that a step computes: pairs of positions, and what it computes again."""

from __future__ import annotations

from typing import NamedTuple

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import is_imported
from graphtrain.models.attention.kernel_support import query_blocks

# Products that a backward pass adds to its four, over the two of a forward pass.
_OF_KERNELS = 1.5  # the scores, and the gradient of the probabilities, twice
_OF_LOG_SUMS = 0.5  # the scores, whose log-sum-exp is kept


class ScoreProducts(NamedTuple):
    """Products of queries with keys, and of probabilities with values."""

    computed: float  # pairs of positions with products, over all pairs
    recomputed: float | None  # forward passes computed again; None: what the remat policy says


ALL_SCORES = ScoreProducts(1.0, None)


def score_products(program: ResolvedProgram, *, flash: bool, masked: bool = True) -> ScoreProducts:
    """Return which products of attention a training step computes.

    Args:
        program: the program.
        flash: Whether attention is a kernel.
        masked: Count only the half of the pairs that a kernel computes under a causal mask.
            Compiled programs are counted without the mask. A ring, and blocks on a CPU, skip pairs
            in the program itself: they are counted alike in both.
    """
    if flash:
        return ScoreProducts(0.5 if masked else 1.0, _OF_KERNELS)
    if devices := _ring_devices(program):
        # Two of four pairs of chunks in a step, three in the first: models/attention/ring.py.
        return ScoreProducts((2 * devices + 1) / (4 * devices), _OF_LOG_SUMS)
    if program.target.platform == "cpu" and _is_native(program):
        blocks = query_blocks(program.batch.seq_len)
        keeps_sums = program.model.remat in ("none", "attention")
        recomputed = _OF_LOG_SUMS if keeps_sums else None
        return ScoreProducts((blocks + 1) / (2 * blocks), recomputed)
    return ALL_SCORES


def skips_scores(program: ResolvedProgram, *, flash: bool) -> bool:
    """Return whether a step leaves out scores that the causal mask hides."""
    return score_products(program, flash=flash).computed < 1


def _ring_devices(program: ResolvedProgram) -> int:
    """Return the number of devices in a ring of attention; 0 without one."""
    axes = program.rules.activations.get("kv_seq", ())
    devices = program.mesh.size(axes)
    return devices if devices > 1 else 0


def _is_native(program: ResolvedProgram) -> bool:
    return not is_imported(program.model) and not program.stands_for_imported
