"""Number of blocks in which MLPs run; by arithmetic, without JAX."""

from __future__ import annotations

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Model
from graphtrain.config.schema.types import item_bytes
from graphtrain.models.flops import is_gated
from graphtrain.models.mlp_support import column_shards, has_own_backward, tokens_of_device

_MOST_BLOCKS = 16
# The forward pass has fewer blocks: fewer arrays of hidden values, and no gradients beside them.
_BACKWARD_OVER_FORWARD = 4
# Each block after the first reads and writes the gradient of the residual stream once more. On an
# H100, which at 0.56 of its peak computes 165 operations in the time of a byte, the 4 bytes of an
# element take the time of 660. With full recomputation each element and column takes 8 for each
# matrix: of two matrices, a block costs as much as 41 columns, of three as much as 28. Of a gated
# MLP a second product adds to the gradient, twice as much if the product does not hide it.
_COLUMNS_OF_TRAFFIC = {True: 28, False: 41}  # by whether the MLP is gated
_MOST_TRAFFIC = 0.025  # of the time of the MLP
_MIN_SAVING = 1 / 1024  # fraction of a device's memory
_COLUMNS_MULTIPLE = 16  # columns of a tile
# Arrays of hidden values that a backward pass has at once: of gate and up the products, their
# gradients and the gradients' operands, and the values that the last product reads. Blocks compute
# these values first, and have fewer.
_ARRAYS = {True: 7, False: 4}  # by whether the MLP is gated
BLOCK_ARRAYS = {True: 4, False: 2}


def mlp_block_count(program: ResolvedProgram) -> int:
    """Return the number of blocks of hidden columns in the backward pass of the program's MLPs.

    With model.mlp_blocks = "auto" there are blocks where they save at least 1/1024 of a device's
    memory, if a layer is recomputed from its input, because other policies of remat save the hidden
    values anyway. There are none where they would compute products twice: with post_norm, whose
    backward pass reads the MLP's output. Nor are there any if weights, activations and gradients
    shard the columns over different mesh axes, or where has_own_backward is false.
    """
    model, target = program.model, program.target
    if not has_own_backward(program):  # first: imported models have none of the settings below
        return 1
    if model.mlp_blocks == "none" or model.remat != "full" or model.post_norm:
        return 1
    if (shards := column_shards(program)) is None:
        return 1
    tokens, columns = tokens_of_device(program), model.mlp // shards
    count = _most_blocks(columns, is_gated(model))
    hidden_bytes = hidden_arrays(model) * tokens * columns * item_bytes(model.dtype)
    saves = hidden_bytes * (1 - 1 / count)
    return count if saves >= _MIN_SAVING * target.memory_bytes else 1


def forward_block_count(blocks: int, *, on_tpu: bool) -> int:
    """Return the number of blocks in the forward pass, given that of the backward pass."""
    return 1 if on_tpu else max(1, blocks // _BACKWARD_OVER_FORWARD)


def hidden_arrays(model: Model) -> int:
    """Return how many arrays of an MLP's hidden values its backward pass has at once."""
    return _ARRAYS[is_gated(model)]


def _most_blocks(columns: int, gated: bool) -> int:
    """Return the largest power of 2 that divides the columns into blocks with little traffic."""
    most = 1 + _MOST_TRAFFIC * columns / _COLUMNS_OF_TRAFFIC[gated]
    count = 1
    while 2 * count <= min(most, _MOST_BLOCKS) and columns % (2 * count * _COLUMNS_MULTIPLE) == 0:
        count *= 2
    return count
