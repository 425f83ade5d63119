"""Availability of a flash attention kernel, by target and model; imports no JAX.

A kernel computes attention one block at a time and never has all scores in memory. This module only
decides whether there is one, also for estimates; `models.flash` calls it.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import AttentionImplementation, Model
from graphtrain.models.flops import value_head_dim
from lowering.errors import LoweringError
from lowering.machine.target import Target

_CPU_BLOCK = 128  # minimum queries of a block on a CPU, in sequences that have as many
_CPU_BLOCKS = 8  # maximum number of blocks; each is unrolled in the program
_POSITIONS = ("q_seq", "kv_seq")  # array axes of positions inside attention
RING_TILE = 512  # most queries of a tile in ring attention, of which one has scores at a time
BLOCK = 128  # positions; block sizes and sequence lengths are multiples of it
_MAX_HEAD_DIM = {"tpu": 256, "cuda": 128}  # largest head_dim whose blocks fit in on-chip memory
_HEAD_DIM_MULTIPLE = {"tpu": 64, "cuda": 16}  # head_dim is a multiple of it
# What the kernels of paged attention compile for: blocks of Triton have sizes of powers of two.
_PAGED_HEAD_DIMS = {"tpu": (128, 256), "cuda": (16, 32, 64, 128, 256)}


@dataclass(frozen=True)
class AttentionSpec:
    """Attention that a model needs, the same for all its layers."""

    dtype: str
    length: int
    head_dim: int
    window: bool = False  # sliding window
    window_varies_by_layer: bool = False  # only some layers have the window
    soft_cap: bool = False  # soft cap of scores
    alibi: bool = False  # ALiBi
    sinks: bool = False  # attention sinks
    narrow_values: bool = False  # values of another width than queries and keys
    sharded_positions: bool = False  # positions are sharded: ring attention
    per_replica: bool = False  # gradients are computed for each data-parallel replica separately

    @classmethod
    def of(
        cls,
        model: Model,
        length: int,
        *,
        sharded_positions: bool = False,
        per_replica: bool = False,
    ) -> AttentionSpec:
        """Return the attention of a decoder for sequences of `length` tokens."""
        assert model.head_dim
        return cls(
            dtype=model.dtype,
            length=length,
            head_dim=model.head_dim,
            window=model.sliding_window is not None,
            window_varies_by_layer=model.global_attention_every is not None,
            soft_cap=model.attn_logit_softcap is not None,
            alibi=model.positions == "alibi",
            sinks=model.attention_sinks,
            narrow_values=value_head_dim(model) != model.head_dim,
            sharded_positions=sharded_positions,
            per_replica=per_replica,
        )


def step_uses_flash_kernel(program: ResolvedProgram) -> bool:
    """Return whether a program's training step uses the flash kernel.

    Raises:
        LoweringError: as uses_flash_kernel.
    """
    return uses_flash_kernel(program.model.attention, attention_of_step(program), program.target)


def attention_of_step(program: ResolvedProgram) -> AttentionSpec:
    """Return the attention of a program's training step."""
    rules, mesh = program.rules, program.mesh
    split = any(mesh.size(rules.activations.get(axis, ())) > 1 for axis in _POSITIONS)
    batch, copies = program.batch, mesh.axes.get("data", 1)
    reduces_once = batch.gradient_reduction == "per_step" and program.stages is None
    per_replica = reduces_once and copies > 1
    return AttentionSpec.of(
        program.model, batch.seq_len, sharded_positions=split, per_replica=per_replica
    )


def query_blocks(length: int) -> int:
    """Return in how many blocks of queries a CPU computes the attention of a sequence."""
    return min(max(length // _CPU_BLOCK, 1), _CPU_BLOCKS)


def uses_flash_kernel(
    implementation: AttentionImplementation, spec: AttentionSpec, target: Target
) -> bool:
    """Return whether attention is computed by the target's flash kernel.

    Raises:
        LoweringError: the setting requires the kernel and there is none; the message says why.
    """
    if implementation == "dense":
        return False
    reason = why_no_kernel(spec, target)
    if reason and implementation == "flash":
        raise LoweringError(
            f'program.model.attention = "flash": {reason}; set it to "auto" or "dense"'
        )
    return not reason


def why_no_kernel(spec: AttentionSpec, target: Target) -> str:
    """Return why the target's kernel cannot compute this attention; empty if it can."""
    platform = target.platform
    if platform not in _MAX_HEAD_DIM:
        return f"{target} has no flash attention kernel; only TPUs and NVIDIA GPUs have one"
    if spec.sharded_positions:
        return "the rules shard positions inside attention, and ring attention uses no kernel"
    if spec.per_replica:
        return (
            'kernels do not support batch.gradient_reduction = "per_step", which computes '
            "gradients for each replica"
        )
    if spec.dtype == "float32":
        return f"kernels compute in bfloat16, and program.precision.compute is {spec.dtype}"
    if spec.alibi:
        return "kernels do not support ALiBi"
    if spec.sinks:
        return "kernels do not support attention sinks"
    if spec.narrow_values:
        return "kernels require values as wide as queries and keys, unlike latent_attention"
    if spec.window_varies_by_layer:
        return (
            "kernels support one window for all layers, and global_attention_every makes some "
            "layers global"
        )
    if platform == "cuda" and (spec.window or spec.soft_cap):
        return (
            f"the kernel of {target} does not support "
            f"{'a sliding window' if spec.window else 'a soft cap of scores'}"
        )
    return _why_no_kernel_for_shape(spec, target)


def uses_paged_kernel(
    implementation: AttentionImplementation,
    spec: AttentionSpec,
    target: Target,
) -> bool:
    """Return whether attention of one new token to a KV cache is computed by the target's kernel.

    `spec` describes the new tokens; their number is its length. With "flash" products are no
    error: they compute the same, and prompts have no kernel here.
    """
    if implementation == "dense" or target.platform not in _PAGED_HEAD_DIMS:
        return False
    return (
        spec.length == 1
        and spec.dtype == "bfloat16"
        and not (spec.window or spec.alibi or spec.sinks or spec.narrow_values)
        and spec.head_dim in _PAGED_HEAD_DIMS[target.platform]
    )


def _why_no_kernel_for_shape(spec: AttentionSpec, target: Target) -> str:
    multiple, max_head_dim = _HEAD_DIM_MULTIPLE[target.platform], _MAX_HEAD_DIM[target.platform]
    if spec.head_dim % multiple or spec.head_dim > max_head_dim:
        return (
            f"the kernel of {target} requires head_dim to be a multiple of {multiple} up to "
            f"{max_head_dim}, and it is {spec.head_dim}"
        )
    if spec.length % BLOCK:
        return f"kernels require a sequence length that is a multiple of {BLOCK}, not {spec.length}"
    return ""
