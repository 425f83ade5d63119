"""Number of blocks in which MLPs run; by arithmetic, without JAX."""

from __future__ import annotations

from dataclasses import replace

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Model, is_imported
from graphtrain.config.schema.types import item_bytes
from graphtrain.models.flops import is_gated
from graphtrain.models.shapes import parameter_arrays
from sharding_rules.arrays import ArraySpec, Role
from sharding_rules.plan import make_layout

_MOST_BLOCKS = 16
_STORED: tuple[Role, ...] = ("parameter", "optimizer")
# Each block after the first reads and writes the gradient of the residual stream once more. On an
# H100, which at 0.56 of its peak computes 165 operations in the time of a byte, this is
# 30 / _FEWEST_COLUMNS = 2.3 % of the time of a gated MLP at most.
_FEWEST_COLUMNS = 1280
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
    memory: on GPUs and TPUs, if a layer is recomputed from its input, because other policies of
    remat save the hidden values anyway. There are none where they would compute products or gather
    weights twice: with post_norm, whose backward pass reads the MLP's output, and with tensor
    parallelism. Mixtures, LoRA and products in fp8 or int8 have none, nor pipelines and gradients
    that are reduced once for each step.
    """
    model, target = program.model, program.target
    if is_imported(model) or program.stands_for_imported or model.mlp_blocks == "none":
        return 1
    if not (target.is_gpu or target.platform == "tpu") or not _supports_blocks(program):
        return 1
    rules, batch = program.rules.activations, program.batch
    token_shards = program.mesh.size(rules.get("batch", ())) * program.mesh.size(
        rules.get("seq", ())
    )
    tokens, count = batch.microbatch_rows * batch.seq_len / token_shards, _most_blocks(model.mlp)
    hidden_bytes = hidden_arrays(model) * tokens * model.mlp * item_bytes(model.dtype)
    saves = hidden_bytes * (1 - 1 / count)
    return count if saves >= _MIN_SAVING * target.memory_bytes else 1


def hidden_arrays(model: Model) -> int:
    """Return how many arrays of an MLP's hidden values its backward pass has at once."""
    return _ARRAYS[is_gated(model)]


def _supports_blocks(program: ResolvedProgram) -> bool:
    model, batch = program.model, program.batch
    return (
        model.remat == "full"
        and model.moe is None
        and not model.fused_gate_up
        and not model.post_norm
        and program.adapter is None
        and program.settings.precision.matmul_dtype is None
        and program.mesh.axes.get("stage", 1) == 1
        and batch.gradient_reduction == "per_microbatch"
        and _devices_have_all_columns(program)
    )


def _devices_have_all_columns(program: ResolvedProgram) -> bool:
    """Return whether neither activations, weights nor gradients shard the MLP's columns."""
    columns = {"mlp": ArraySpec((program.model.mlp,), ("mlp",), role="activation")}
    for path, spec in parameter_arrays(program.model).items():
        if "/mlp/" in path and "mlp" in spec.axes:
            for role in _STORED:
                columns[f"{role}/{path}"] = replace(spec, role=role)
    return all(_devices_have_all(program, path, spec) for path, spec in columns.items())


def _devices_have_all(program: ResolvedProgram, path: str, spec: ArraySpec) -> bool:
    split = make_layout(path, spec, program.rules, program.mesh).split[spec.axes.index("mlp")]
    return program.mesh.size(split) == 1


def _most_blocks(columns: int) -> int:
    """Return the largest power of 2 that divides the columns into blocks that are wide."""
    count = 1
    while (
        count < _MOST_BLOCKS
        and columns % (2 * count * _COLUMNS_MULTIPLE) == 0
        and columns // (2 * count) >= _FEWEST_COLUMNS
    ):
        count *= 2
    return count
