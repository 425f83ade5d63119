"""Trained and frozen weights of a program as ArraySpecs, in the layout of its pipeline stages."""

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.graphs.open_model import open_language_model
from graphtrain.models.lora.trainable import frozen_arrays, trained_arrays
from lowering.trees import Tree, unflatten


def trained_specs(program: ResolvedProgram) -> Tree:
    """Return the ArraySpecs of the trained parameters, as a run stores them."""
    if program.adapter is None:
        return _in_stages(program, open_language_model(program.model).specs())
    return _in_stages(program, unflatten(trained_arrays(program.settings)))


def frozen_specs(program: ResolvedProgram) -> Tree | None:
    """Return the ArraySpecs of the frozen weights; None if all weights are trained."""
    frozen = frozen_arrays(program)
    return _in_stages(program, unflatten(frozen)) if frozen else None


def _in_stages(program: ResolvedProgram, specs: Tree) -> Tree:
    if program.stages is None:
        return specs
    return open_language_model(program.model).pipeline_specs(specs, program.stages)
