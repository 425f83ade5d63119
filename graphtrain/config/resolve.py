"""Resolution of a program for its target: the mesh, pipeline stages, rows of layers."""

import dataclasses

from graphtrain.config.schema import Program, check_pipeline, is_imported
from graphtrain.errors import PlanError
from lowering.machine.target import Target
from sharding_rules.mesh import MeshShape
from sharding_rules.pipeline import Stages
from sharding_rules.rules import Rules


def mesh_shape(program: Program) -> MeshShape:
    """Return the mesh of a program; one axis may be sized to use all remaining devices."""
    sizes = dataclasses.asdict(program.mesh)
    return MeshShape.resolve(sizes, Target.parse(program.target).devices)


def stages_of(program: Program) -> Stages | None:
    """Return the assignment of layers to pipeline stages, or None without a pipeline.

    Raises:
        LoweringError: the target is unknown.
        ShardingError: the layers or microbatches cannot be divided among the stages.
    """
    stages = mesh_shape(program).axes.get("stage", 1)
    if stages == 1 or "stage" not in Rules.load(program.rules).activations.get("stages", ()):
        return None
    return check_pipeline(program, stages)


def layer_rows(program: Program) -> tuple[int | None, ...]:
    """Return the layer in each row of a run's stacked arrays; None for a padding row of a stage.

    Raises:
        PlanError: the model is imported from PyTorch, whose layers are not stacked this way.
    """
    if is_imported(program.model):
        raise PlanError(
            "this operation supports only the native decoder, not model.torch or model.hf; "
            "a run can resume their checkpoints on any mesh without it"
        )
    stages = stages_of(program)
    return tuple(range(program.model.layers)) if stages is None else stages.rows
