"""Trained and frozen weights of a program as ArraySpecs, in the layout of its pipeline stages."""

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.graphs.open_model import open_language_model
from lowering.trees import Tree


def trained_specs(program: ResolvedProgram) -> Tree:
    """Return the ArraySpecs of the trained parameters, as a run stores them."""
    model = open_language_model(program.model)
    return _in_stages(program, model.trained_specs(program.settings))


def frozen_specs(program: ResolvedProgram) -> Tree | None:
    """Return the ArraySpecs of the frozen weights; None if all weights are trained."""
    specs = open_language_model(program.model).frozen_specs(program)
    return None if specs is None else _in_stages(program, specs)


def _in_stages(program: ResolvedProgram, specs: Tree) -> Tree:
    if program.stages is None:
        return specs
    return open_language_model(program.model).pipeline_specs(specs, program.stages)
