"""A program's model, native or of PyTorch, as pure functions: the one place that knows which.

PyTorch is imported only for a model that is one of its own.
"""

from __future__ import annotations

from typing import Any

import jax

from graphtrain.config.schema import Model, is_imported
from graphtrain.models import decode, decoder
from graphtrain.models import pipeline_stages as native
from lowering.pipeline.schedules import Pipeline
from lowering.trees import Tree, unflatten
from sharding_rules.pipeline import Stages


def parameter_specs(model: Model) -> Tree:
    """The tree of parameters as ArraySpecs; allocates nothing."""
    if is_imported(model):
        return unflatten(_open(model).specs())
    return decoder.parameter_specs(model)


def initialize(model: Model, key: jax.Array) -> Tree:
    """New float32 parameters, in the tree of parameter_specs."""
    if is_imported(model):
        return _open(model).initialise(key)
    return decoder.initialize(model, key)


def to_pipeline_layout(model: Model, parameters: Tree, stages: Stages) -> Tree:
    """Parameters, with their layers stored for the stages of a pipeline.

    Raises:
        ShardingError: the model cannot be a pipeline.
    """
    if is_imported(model):
        from graphtrain.torch_frontend import staged

        return staged.arrange(_open(model), parameters, stages)
    return native.to_pipeline_layout(parameters, stages)


def pipeline_specs(model: Model, specs: Tree, stages: Stages) -> Tree:
    """ArraySpecs of what arrange returns. Raises as it does."""
    if is_imported(model):
        from graphtrain.torch_frontend import staged

        return staged.arrange(_open(model), specs, stages)
    return native.pipeline_specs(specs, stages)


def pipeline(
    model: Model,
    stages: Stages,
    score: native.LossFunction,
    keys: native.Keys | None,
    term_weight: float,
    tokens: jax.Array,
) -> Pipeline:
    """What a model computes of a microbatch, in the parts of a pipeline.

    Args:
        model: Settings.
        stages: The division of its layers.
        score: Of logits.
        keys: For dropout; without them nothing is dropped.
        term_weight: Of what the layers of one microbatch add to the loss.
        tokens: Of all microbatches.
    """
    if is_imported(model):
        from graphtrain.torch_frontend import staged

        return staged.imported_pipeline(_open(model), stages, score, keys, tokens)
    return native.decoder_pipeline(model, stages, score, keys, term_weight)


def split_for_pipeline(model: Model, parameters: Tree) -> Tree:
    """Parameters as a Pipeline takes them; what is tied is in two places."""
    if is_imported(model):
        return _open(model).parts.divide(parameters)
    return native.split_for_pipeline(model, parameters)


def merge_gradients(model: Model, gradients: Tree, parameters: Tree) -> Tree:
    """Gradients of the parameters that divide was given."""
    if is_imported(model):
        return _open(model).parts.join(gradients, parameters)
    return native.merge_gradients(gradients)


def has_dropout(model: Model) -> bool:
    """Whether training may drop something, so that it takes a key."""
    return is_imported(model) or bool(model.dropout)


def forward(
    model: Model, parameters: Tree, tokens: jax.Array, *, dropout_key: jax.Array | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scores of every next token, and what the layers add to the loss."""
    if is_imported(model):
        return _open(model).forward(parameters, tokens, dropout_key)
    return decoder.forward(model, parameters, tokens, dropout_key=dropout_key)


def head_inputs(
    model: Model, parameters: Tree, tokens: jax.Array, *, dropout_key: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """What the head reads, its weights, and what the layers add; of a native model."""
    assert not is_imported(model), "a module of PyTorch keeps its head to itself"
    return decoder.head_inputs(model, parameters, tokens, dropout_key=dropout_key)


def kv_cache_specs(model: Model, sequences: int, longest: int) -> Tree:
    """What is kept of so many sequences of so many tokens, to continue them.

    Raises:
        ImportedModelError: the model's attention does not continue a sequence.
    """
    if is_imported(model):
        from graphtrain.torch_frontend import continuing as imported

        return imported.kv_cache_specs(_open(model), sequences, longest)
    return decode.kv_cache_specs(model, sequences, longest)


def decode_step(
    model: Model, parameters: Tree, kept: Tree, tokens: jax.Array, begin: jax.Array
) -> tuple[jax.Array, Tree]:
    """Scores of every next token, and what is kept then.

    Args:
        model: Settings.
        parameters: Weights.
        kept: As kept_specs has it.
        tokens: (batch, seq), those that follow.
        begin: The position of the first.
    """
    if is_imported(model):
        from graphtrain.torch_frontend import continuing as imported

        return imported.decode_step(_open(model), parameters, kept, tokens, begin)
    return decode.decode_step(model, parameters, kept, tokens, begin)


def _open(model: Any) -> Any:
    from graphtrain.torch_frontend.versions import check_versions, installed

    check_versions(installed(), hf=model.hf is not None)  # before an import fails in other words
    from graphtrain.torch_frontend.model import open_model

    return open_model(model)
