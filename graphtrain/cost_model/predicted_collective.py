"""Helpers of the predictions of weights' and of activations' collectives."""

from __future__ import annotations

from collections.abc import Sequence

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.passes import Passes
from graphtrain.cost_model.weights import ShardedWeight
from lowering.hlo.collectives import Collective
from sharding_rules.axes import MESH_AXES
from sharding_rules.mesh import MeshShape
from sharding_rules.rules import Table


def collective(
    op: str,
    axes: Sequence[str],
    count: int,
    size: float,
    *,
    mesh: MeshShape,
    dtype: str,
    exposed: bool = False,
    beside_tick: bool = False,
) -> Collective:
    """Return a collective over mesh axes, in mesh order.

    Args:
        op: Its name in HLO.
        axes: Mesh axes.
        count: Executions in a step.
        size: Bytes of the unsplit array.
        mesh: The mesh.
        dtype: The dtype in HLO.
        exposed: Whether it is a pipeline's sum with no compute beside it.
        beside_tick: Whether it is one that overlaps with a tick.
    """
    ordered = tuple(axis for axis in MESH_AXES if axis in axes)
    return Collective(
        op,
        ordered,
        mesh.size(ordered),
        count,
        round(size),
        dtype,
        exposed=exposed,
        beside_tick=beside_tick,
    )


def splitting_axes(table: Table, names: Sequence[str], mesh: MeshShape) -> tuple[str, ...]:
    """Return the mesh axes of more than one device that shard any of the array axes."""
    axes = {axis for name in names for axis in table.get(name, ())}
    return tuple(axis for axis in MESH_AXES if axis in axes and mesh.axes.get(axis, 1) > 1)


def reduce_scatter(program: ResolvedProgram) -> str:
    """Return the operation that sums to shards.

    XLA for CPUs has only the all-reduce, of which each device then keeps its shard.
    """
    return "all-reduce" if program.target.platform == "cpu" else "reduce-scatter"


def activation_dtype(program: ResolvedProgram) -> tuple[int, str]:
    """Return the bytes per element and the dtype in which activations and weights are sent.

    XLA for CPUs converts bfloat16 and float16 to float32 before it sends.
    """
    if program.model.dtype == "float32" or program.target.platform == "cpu":
        return 4, "f32"
    return 2, "f16" if program.model.dtype == "float16" else "bf16"


def recomputes(program: ResolvedProgram) -> bool:
    """Return whether the backward pass computes parts of the forward pass again."""
    return program.model.remat != "none"


def gathered_axes(weight: ShardedWeight) -> tuple[str, ...]:
    """Return the mesh axes over which a stored weight is gathered for use."""
    return tuple(axis for axis in weight.stored if axis not in (*weight.in_use, "stage"))


def layers_per_device(program: ResolvedProgram, weight: ShardedWeight) -> int:
    """Return the number of layers that a device holds; 1 for a weight outside of the layers."""
    stages = program.mesh.axes.get("stage", 1)
    return weight.spec.shape[0] // stages if weight.in_layers else 1


def uses_ahead(program: ResolvedProgram, weight: ShardedWeight) -> int:
    """Return how often multi-token prediction uses a weight that it shares with the model."""
    is_shared = weight.path in ("embedding/tokens", "head")
    return Passes.of(program).ahead if is_shared else 0


def is_tied(program: ResolvedProgram, weight: ShardedWeight) -> bool:
    """Return whether the weight is an embedding that is also the LM head."""
    return program.model.tie_word_embeddings and weight.path == "embedding/tokens"
