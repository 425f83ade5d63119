"""Availability of a product that computes active experts only, by target; imports no JAX.

A dropless mixture multiplies each row by the matrix of one expert. TPUs have a ragged product that
does so. XLA for other machines expands it: all rows times the matrices of all experts. On NVIDIA
GPUs `models.grouped_matmul` has kernels instead.
"""

from __future__ import annotations

from graphtrain.config.resolve import ResolvedProgram
from lowering.machine.target import Target

MULTIPLE = 16  # each dimension of a matrix is a multiple of it: the smallest Triton product
BLOCK = 128  # rows; every block belongs to one expert
_MAX_ELEMENTS = 2**31  # Triton kernels of JAX compute offsets in 32 bits


def step_computes_all_experts(program: ResolvedProgram) -> str:
    """Return why a program's dropless mixture computes all experts for each row; empty if not."""
    model, mesh = program.model, program.mesh
    if model.moe is None or model.moe.capacity_factor is not None:
        return ""
    if program.target.platform == "tpu":
        return ""
    shards = {
        axis: mesh.size(program.rules.activations.get(axis, ())) for axis in ("experts", "mlp")
    }
    experts, width = model.moe.experts // shards["experts"], model.mlp // shards["mlp"]
    batch = program.batch
    devices = mesh.size(
        tuple({name for axis in ("batch", "seq") for name in _axes(program, axis)})
    )  # those of the experts gather their tokens
    choices = batch.microbatch_rows * batch.seq_len * model.moe.experts_per_token // devices
    gathered = choices * shards["experts"]
    return why_no_grouped_matmul(program.target, experts, model.embed, width, gathered)


def _axes(program: ResolvedProgram, axis: str) -> tuple[str, ...]:
    names = program.rules.activations.get(axis, ())
    return (names,) if isinstance(names, str) else tuple(names)


def why_no_grouped_matmul(target: Target, experts: int, embed: int, mlp: int, choices: int) -> str:
    """Return why there is no kernel for an expert product on a target; empty if there is one.

    Args:
        target: the machine.
        experts: Number of experts on a device.
        embed: Width of the residual stream.
        mlp: Hidden width of an expert on a device.
        choices: Number of choices, k for each token, that a device arranges by expert.
    """
    if target.platform != "cuda":
        return f"{target} has no grouped matrix product"
    if embed % MULTIPLE or mlp % MULTIPLE:
        return (
            f"the grouped matrix product of {target} requires multiples of {MULTIPLE}, and an "
            f"expert's matrices on a device are {embed} x {mlp}"
        )
    if experts * embed * mlp >= _MAX_ELEMENTS:
        return (
            f"the grouped matrix product of {target} is limited to {_MAX_ELEMENTS:,} weights of "
            f"experts on a device, and a layer has {experts * embed * mlp:,}"
        )
    if (choices + (experts + 1) * BLOCK) * max(embed, mlp) >= _MAX_ELEMENTS:
        return (
            f"the grouped matrix product of {target} is limited to {_MAX_ELEMENTS:,} elements, and "
            f"a device has {choices:,} choices of {max(embed, mlp):,}; use more microbatches"
        )
    return ""
