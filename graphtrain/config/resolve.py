"""Resolution of a program for its target: the mesh, pipeline stages, rows of layers."""

import dataclasses

from graphtrain.config.schema import Program, check_pipeline, is_imported
from graphtrain.errors import PlanError
from lowering.machine.target import Target
from sharding_rules.mesh import MeshShape
from sharding_rules.pipeline import Stages
from sharding_rules.rules import Rules


def mesh_shape(program: Program) -> MeshShape:
    """The mesh of a program, with the axis that takes the rest of the target's devices."""
    sizes = dataclasses.asdict(program.mesh)
    return MeshShape.resolve(sizes, Target.parse(program.target).devices)


def stages_of(program: Program) -> Stages | None:
    """How the layers of a program are divided among stages; None where it is no pipeline.

    Raises:
        LoweringError: no such target.
        ShardingError: layers or microbatches that the stages cannot take.
    """
    stages = mesh_shape(program).axes.get("stage", 1)
    if stages == 1 or "stage" not in Rules.load(program.rules).activations.get("stages", ()):
        return None
    return check_pipeline(program, stages)


def rows_of_layers(program: Program) -> tuple[int | None, ...]:
    """The layer in each row of the stacks that a run keeps; none in a row that fills a stage.

    Raises:
        PlanError: the model is one of PyTorch, whose layers have no rows of ours.
    """
    if is_imported(program.model):
        raise PlanError(
            "this knows the layers of the native decoder, not those of model.torch or model.hf; "
            "their checkpoints go into any mesh when a run goes on from them"
        )
    stages = stages_of(program)
    return tuple(range(program.model.layers)) if stages is None else stages.rows
