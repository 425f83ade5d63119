"""Padding of a pipeline whose stages have unequal numbers of layers."""

from dataclasses import replace

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.native_equivalent import with_native_model


def with_padding_layers(program: ResolvedProgram) -> ResolvedProgram:
    """Return a program with a layer for each row of its stages; padding takes memory and time too.

    Raises:
        PlanError: as with_native_model.
        ShardingError: layers or microbatches that do not fit the stages.
    """
    program = program.with_settings(with_native_model(program.settings))
    if program.stages is None:
        return program
    padded = replace(
        program.settings,
        model=replace(program.model, layers=len(program.stages.rows)),
        pipeline=replace(program.pipeline, layers_per_stage=None),
    )
    return program.with_settings(padded)
