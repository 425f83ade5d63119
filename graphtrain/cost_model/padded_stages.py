"""Rows of a pipeline's stages that take memory and time without being layers of the stage."""

from dataclasses import replace

from graphtrain.config.computed_once import computed_once
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import is_imported
from graphtrain.cost_model.native_equivalent import with_native_model
from graphtrain.cost_model.tower import tower_of


@computed_once
def with_padding_layers(program: ResolvedProgram) -> ResolvedProgram:
    """Return a program with a layer for each row of its stages; padding takes memory and time too.

    Layers outside of the stages of an imported model are rows of every stage: each device stores
    them. That is also an upper bound of their time, because stages divide their microbatches.

    Raises:
        PlanError: as with_native_model.
        ShardingError: layers or microbatches that do not fit the stages.
    """
    given, tower = program.stages, program.tower or tower_of(program.settings)
    native = program.with_settings(with_native_model(program.settings))
    stands_for_imported = program.stands_for_imported or is_imported(program.model)
    program = replace(native, tower=tower, stands_for_imported=stands_for_imported)
    if program.stages is None or given is None:
        return program
    outside = program.model.layers - sum(given.layers)
    copies = len(given.layers) * -(-outside // given.rounds)
    padded = replace(
        program.settings,
        model=replace(program.model, layers=len(given.rows) + copies),
        pipeline=replace(program.pipeline, layers_per_stage=None),
    )
    return replace(program.with_settings(padded), layers_outside=program.layers_outside + outside)
