"""Positions of a sequence of which one device computes the loss; loss.chunk divides them."""

from __future__ import annotations

from graphtrain.config.schema import Program
from sharding_rules.errors import ShardingError
from sharding_rules.mesh import MeshShape
from sharding_rules.rules import Rules


def loss_positions(program: Program, mesh: MeshShape, rules: Rules) -> tuple[int, int]:
    """Return the positions of a sequence on one device, and the stages that 1F1B splits them over.

    The positions are those that one stage computes the loss of.
    """
    positions = program.batch.seq_len // mesh.size(rules.activations.get("seq", ()))
    is_split = program.pipeline.schedule == "1f1b"
    stages = mesh.axes.get("stage", 1) if is_split else 1
    return positions // stages, stages


def check_loss_chunk(program: Program, mesh: MeshShape, rules: Rules) -> None:
    """Check that the loss can be computed in the chunks that loss.chunk sets, if it sets them.

    Raises:
        ShardingError: as check_chunk, or chunks in a pipeline with multi-token prediction.
    """
    chunk = program.loss.chunk
    if not isinstance(chunk, int):
        return
    if has_two_losses_in_stages(program, mesh):
        raise ShardingError(
            "loss.chunk is not supported with a pipeline and program.model.mtp_loss_weight; "
            "remove one of them, or set mesh.stage = 1"
        )
    check_chunk(chunk, *loss_positions(program, mesh, rules))


def has_two_losses_in_stages(program: Program, mesh: MeshShape) -> bool:
    """Return whether a pipeline computes the loss of multi-token prediction too."""
    return mesh.axes.get("stage", 1) > 1 and program.model.mtp_loss_weight is not None


def check_chunk(chunk: int, positions: int, stages: int = 1) -> None:
    """Raise if a chunk does not divide the positions of a sequence on one device.

    Args:
        chunk: Positions of a chunk.
        positions: Positions of a sequence on one device.
        stages: Number of pipeline stages that the positions are split over.

    Raises:
        ShardingError: the message says what to change.
    """
    if positions % chunk:
        split, cause = "", "the rules that shard seq"
        if stages > 1:
            split = f", which 1f1b splits over mesh.stage = {stages}"
            cause = 'mesh.stage, or set pipeline.schedule = "circular"'
        raise ShardingError(
            f"loss.chunk = {chunk} does not divide the {positions} positions of a sequence on one "
            f"device{split}; change loss.chunk, batch.seq_len, or {cause}"
        )
