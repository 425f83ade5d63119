"""Bytes that a step reads and writes between its products: norms, residuals, activation functions.

On an accelerator these operations are limited by the memory's bandwidth and run between the
products, not beside them. So their seconds add to those of the products. So do those of sums that
products of parts read and write again: of the LM head's gradient over chunks of the loss, and of an
MLP's output and its input's gradient over blocks of hidden columns.
"""

from __future__ import annotations

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import scored_layers
from graphtrain.cost_model.passes import Passes
from graphtrain.cost_model.score_products import score_products
from graphtrain.cost_model.sizes import DeviceSizes
from graphtrain.cost_model.tower import tower_program
from graphtrain.models.flops import is_gated
from graphtrain.models.lora.trainable import trains_head
from graphtrain.models.mlp_block_count import forward_block_count, mlp_block_count

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
    scores = 0.0
    if not flash:
        scores = scored_layers(program.model) * sizes.layers * _scores(program, sizes)
    scores *= _PASSES + (program.model.remat != "none")
    scores *= score_products(program, flash=flash).computed
    logits = _PASSES * _logits(program, sizes)
    blocks = sizes.layers * _sums_of_blocks(program, sizes)
    of_microbatch = _REPEATS * layers + scores + logits + blocks
    return microbatches * of_microbatch + _sums_of_chunks(program, sizes) + of_tower


def _layer(program: ResolvedProgram, sizes: DeviceSizes) -> float:
    """Return the bytes of one layer's forward pass over one microbatch."""
    model = program.model
    residual = 10 * model.embed * sizes.seq_residual  # two norms, two sums with the residual
    rotated = 2 * (sizes.heads + sizes.kv_heads) * sizes.head_dim
    chosen = model.moe.experts_per_token if model.moe else 1
    hidden = (3 if is_gated(model) else 2) * sizes.mlp * chosen
    return sizes.sequences * sizes.item_bytes * (residual + (rotated + hidden) * sizes.seq_in_block)


def _scores(program: ResolvedProgram, sizes: DeviceSizes) -> float:
    """Return the bytes of the scores of one layer, which softmax reads and writes.

    The positions of a device have scores with all others; in a ring, block after block.
    """
    queries = sizes.sequences * sizes.heads * sizes.seq_in_block
    return _SCORE_BYTES * queries * program.batch.seq_len


def _logits(program: ResolvedProgram, sizes: DeviceSizes) -> float:
    """Return the bytes of the logits of one microbatch; a stage has its share of them."""
    stages = program.mesh.axes.get("stage", 1)
    return 4 * sizes.sequences * sizes.seq_in_block * sizes.vocab / stages


def _sums_of_chunks(program: ResolvedProgram, sizes: DeviceSizes) -> float:
    """Return the bytes of the head's gradient, in float32, to which each chunk of a step adds."""
    passes = Passes.of(program)
    chunks = round(passes.scored * sizes.seq_in_block / sizes.logit_positions)
    if not sizes.in_chunks or chunks == 1 or not trains_head(program.settings):
        return 0.0
    times = chunks * (passes.heads + passes.ahead)
    return times * 2 * 4 * program.model.embed * sizes.vocab


def _sums_of_blocks(program: ResolvedProgram, sizes: DeviceSizes) -> float:
    """Return the bytes of sums over the blocks of one MLP, of one microbatch.

    Each product after the first block's adds to the sum: one to the output, and to the gradient of
    the input those of gate and up.
    """
    blocks = mlp_block_count(program)
    if blocks == 1:
        return 0.0
    forward = forward_block_count(blocks, on_tpu=program.target.platform == "tpu")
    sums = (forward - 1) + (blocks - 1) * (2 if is_gated(program.model) else 1)
    stream = sizes.sequences * sizes.seq_in_block * program.model.embed * sizes.item_bytes
    return 2 * sums * stream
