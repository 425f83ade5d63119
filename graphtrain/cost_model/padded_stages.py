"""The filler of a pipeline whose stages have unequal numbers of layers."""

from dataclasses import replace

from graphtrain.config.resolve import stages_of
from graphtrain.config.schema import Program
from graphtrain.cost_model.native_equivalent import estimable


def with_filler(program: Program) -> Program:
    """A program with as many layers as its stages hold rows: those of zeros take memory and time.

    Raises:
        PlanError: as estimable.
        ShardingError: layers or microbatches that the stages cannot take.
    """
    program = estimable(program)
    stages = stages_of(program)
    if stages is None:
        return program
    return replace(
        program,
        model=replace(program.model, layers=len(stages.rows)),
        pipeline=replace(program.pipeline, layers=None),
    )
