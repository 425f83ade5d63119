"""Padding of a pipeline whose stages have unequal numbers of layers."""

from dataclasses import replace

from graphtrain.config.resolve import stages_of
from graphtrain.config.schema import Program
from graphtrain.cost_model.native_equivalent import with_native_model


def with_padding_layers(program: Program) -> Program:
    """Return a program with a layer for each row of its stages; padding takes memory and time too.

    Raises:
        PlanError: as estimable.
        ShardingError: layers or microbatches that do not fit the stages.
    """
    program = with_native_model(program)
    stages = stages_of(program)
    if stages is None:
        return program
    return replace(
        program,
        model=replace(program.model, layers=len(stages.rows)),
        pipeline=replace(program.pipeline, layers_per_stage=None),
    )
