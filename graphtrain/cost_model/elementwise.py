"""Bytes that a step reads and writes between its products: norms, residuals, activation functions.

On an accelerator these operations are limited by the memory's bandwidth and run between the
products, not beside them. So their seconds add to those of the products.
"""

from __future__ import annotations

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.sizes import DeviceSizes
from graphtrain.cost_model.tower import tower_program
from graphtrain.models.flops import is_gated

# Passes over the layers: forward, and a backward pass that reads and writes twice as much.
_PASSES = 3
# What a compiled step reads and writes over what one fused kernel for each operation would: casts
# to float32, reductions of norms, gradients of the scales. Fitted, tests/benchmarks/published.py.
_REPEATS = 1.9
_SCORE_BYTES = 3 * 4  # float32, read for the maximum and for the exponential, and written


def elementwise_bytes(program: ResolvedProgram, flash: bool) -> float:
    """Return the bytes that a device reads and writes between the products of a step.

    Args:
        program: the program.
        flash: Whether attention is a kernel, which keeps its scores on the chip.
    """
    sizes, microbatches = DeviceSizes.of(program), program.batch.microbatches
    again = program.model.remat == "full"
    tower = tower_program(program)
    of_tower = 0.0 if tower is None else elementwise_bytes(tower, flash=False)
    layers = (_PASSES + again) * sizes.layers * _layer(program, sizes)
    scores = 0.0 if flash else sizes.layers * _scores(sizes)
    scores *= _PASSES + (program.model.remat != "none")
    logits = _PASSES * _logits(program, sizes)
    return microbatches * (_REPEATS * layers + scores + logits) + of_tower


def _layer(program: ResolvedProgram, sizes: DeviceSizes) -> float:
    """Return the bytes of one layer's forward pass over one microbatch."""
    model = program.model
    residual = 10 * model.embed * sizes.seq_residual  # two norms, two sums with the residual
    rotated = 2 * (sizes.heads + sizes.kv_heads) * sizes.head_dim
    chosen = model.moe.experts_per_token if model.moe else 1
    hidden = (3 if is_gated(model) else 2) * sizes.mlp * chosen
    return sizes.sequences * sizes.item_bytes * (residual + (rotated + hidden) * sizes.seq_in_block)


def _scores(sizes: DeviceSizes) -> float:
    """Return the bytes of the scores of one layer, which softmax reads and writes."""
    return _SCORE_BYTES * sizes.sequences * sizes.heads * sizes.seq_in_block * sizes.kv_positions


def _logits(program: ResolvedProgram, sizes: DeviceSizes) -> float:
    """Return the bytes of the logits of one microbatch; a stage has its share of them."""
    stages = program.mesh.axes.get("stage", 1)
    return 4 * sizes.sequences * sizes.seq_in_block * sizes.vocab / stages
