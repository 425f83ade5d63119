"""Availability of a product that computes active experts only, by target; imports no JAX.

A dropless mixture multiplies each row by the matrix of one expert. TPUs have a ragged product that
does so. XLA for other machines expands it: all rows times the matrices of all experts. On NVIDIA
GPUs `models.grouped_matmul` has kernels instead; on CPUs imported models multiply in the loops of
`models.block_products`.
"""

from __future__ import annotations

from graphtrain.config.resolve import ResolvedProgram
from lowering.machine.target import Target

MULTIPLE = 16  # each dimension of a matrix is a multiple of it: the smallest Triton product
BLOCK = 128  # rows; every block belongs to one expert
_MAX_ELEMENTS = 2**31  # Triton kernels of JAX compute offsets in 32 bits
_LEAST_ROWS, _MOST_ROWS = 8, 128  # rows of a block in a loop over blocks


def step_computes_all_experts(program: ResolvedProgram) -> str:
    """Return why a program's dropless mixture computes all experts for each row; empty if not."""
    model = program.model
    if model.moe is None or model.moe.capacity_factor is not None:
        return ""
    if program.target.platform == "tpu":
        return ""
    experts, width, gathered = _sizes_on_device(program)
    return why_no_grouped_matmul(program.target, experts, model.embed, width, gathered)


def imported_step_computes_all_experts(program: ResolvedProgram) -> str:
    """Return why a program of an imported mixture computes all experts for each token.

    Args:
        program: the program, with a native model of the imported one's sizes.
    """
    target = program.target
    if program.mesh.size(_axes(program, "seq")) > 1:
        return "experts of imported models need whole sequences on a device"
    if target.platform != "cpu":
        return step_computes_all_experts(program)
    experts, _, gathered = _sizes_on_device(program)
    if program.mesh.size(_axes(program, "experts")) > 1:
        return f"{target} has no product of blocks of rows with experts on several devices"
    if not rows_of_block(gathered, experts):
        return (
            f"a device of {target} has {gathered:,} choices for {experts} experts, too few for "
            f"blocks of {_LEAST_ROWS} rows"
        )
    return ""


def _sizes_on_device(program: ResolvedProgram) -> tuple[int, int, int]:
    """Return a device's number of experts, their hidden width, and the choices it arranges."""
    model, mesh, batch = program.model, program.mesh, program.batch
    assert model.moe is not None
    shards = {axis: mesh.size(_axes(program, axis)) for axis in ("experts", "mlp")}
    experts, width = model.moe.experts // shards["experts"], model.mlp // shards["mlp"]
    devices = mesh.size(
        tuple({name for axis in ("batch", "seq") for name in _axes(program, axis)})
    )  # those of the experts gather their tokens
    choices = batch.microbatch_rows * batch.seq_len * model.moe.experts_per_token // devices
    return experts, width, choices * shards["experts"]


def _axes(program: ResolvedProgram, axis: str) -> tuple[str, ...]:
    names = program.rules.activations.get(axis, ())
    return (names,) if isinstance(names, str) else tuple(names)


def rows_of_block(choices: int, experts: int) -> int:
    """Return the rows of a block, or 0 if there are too few choices for blocks.

    At most an eighth of the mean number of choices of an expert. The loop has a block more for each
    expert, so that padding adds at most an eighth to the operations.

    Args:
        choices: Number of choices, k for each token, that a device arranges by expert.
        experts: Number of experts on the device.
    """
    most = choices // (8 * experts)
    if most < _LEAST_ROWS:
        return 0
    return min(1 << (most.bit_length() - 1), _MOST_ROWS)


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
