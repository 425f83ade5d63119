"""Functions of a program's model, dispatched to the native decoder or to an imported model.

PyTorch is imported only for an imported model.
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
    """Return the tree of parameters as ArraySpecs; nothing is allocated."""
    if is_imported(model):
        return unflatten(_open(model).specs())
    return decoder.parameter_specs(model)


def initialize(model: Model, key: jax.Array) -> Tree:
    """Return new float32 parameters, in the tree of parameter_specs."""
    if is_imported(model):
        return _open(model).initialise(key)
    return decoder.initialize(model, key)


def to_pipeline_layout(model: Model, parameters: Tree, stages: Stages) -> Tree:
    """Reorder the layer rows of parameters for the stages of a pipeline.

    Raises:
        ShardingError: the model cannot be split into pipeline stages.
    """
    if is_imported(model):
        from graphtrain.torch_frontend import staged

        return staged.to_stage_order(_open(model), parameters, stages)
    return native.to_pipeline_layout(parameters, stages)


def pipeline_specs(model: Model, specs: Tree, stages: Stages) -> Tree:
    """Return the ArraySpecs of the parameters that to_pipeline_layout returns.

    Raises:
        ShardingError: the model cannot be split into pipeline stages.
    """
    if is_imported(model):
        from graphtrain.torch_frontend import staged

        return staged.to_stage_order(_open(model), specs, stages)
    return native.pipeline_specs(specs, stages)


def pipeline(
    model: Model,
    stages: Stages,
    score: native.LossFunction,
    keys: native.Keys | None,
    term_weight: float,
    tokens: jax.Array,
) -> Pipeline:
    """Build the Pipeline of a model: what each part computes of one microbatch.

    Args:
        model: settings.
        stages: number of layers in each stage.
        score: loss function, of logits and a microbatch.
        keys: dropout key by microbatch; None disables dropout.
        term_weight: factor of the terms that the layers of one microbatch add to the loss.
        tokens: token ids of all microbatches, (microbatches, sequences, seq).

    Raises:
        ShardingError: the model cannot be split into pipeline stages.
    """
    if is_imported(model):
        from graphtrain.torch_frontend import staged

        return staged.imported_pipeline(_open(model), stages, score, keys, tokens)
    return native.decoder_pipeline(model, stages, score, keys, term_weight)


def split_for_pipeline(model: Model, parameters: Tree) -> Tree:
    """Split parameters into the parts of a Pipeline; a tied weight is in two parts."""
    if is_imported(model):
        return _open(model).parts.split_parameters(parameters)
    return native.split_for_pipeline(model, parameters)


def merge_gradients(model: Model, gradients: Tree, parameters: Tree) -> Tree:
    """Merge gradients of the parts into the tree of `parameters`; tied weights are summed."""
    if is_imported(model):
        return _open(model).parts.merge_gradients(gradients, parameters)
    return native.merge_gradients(gradients)


def has_dropout(model: Model) -> bool:
    """Return true if training may apply dropout, and so needs a key."""
    return is_imported(model) or bool(model.dropout)


def forward(
    model: Model, parameters: Tree, tokens: jax.Array, *, dropout_key: jax.Array | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return logits (batch, seq, vocab), and the terms that the layers add to the loss, by name.

    Args:
        model: settings.
        parameters: weights.
        tokens: token ids, (batch, seq).
        dropout_key: None disables dropout.
    """
    if is_imported(model):
        return _open(model).forward(parameters, tokens, dropout_key)
    return decoder.forward(model, parameters, tokens, dropout_key=dropout_key)


def head_inputs(
    model: Model, parameters: Tree, tokens: jax.Array, *, dropout_key: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Return the input of the LM head, its weights, and the layers' terms of the loss, by name.

    Only native models support it.
    """
    assert not is_imported(model), "the LM head of an imported model is not accessible"
    return decoder.head_inputs(model, parameters, tokens, dropout_key=dropout_key)


def kv_cache_specs(model: Model, sequences: int, longest: int) -> Tree:
    """Return the specs of the KV cache.

    Args:
        model: settings.
        sequences: number of sequences.
        longest: maximum number of tokens in a sequence.

    Raises:
        ImportedModelError: the model's attention does not support a KV cache.
    """
    if is_imported(model):
        from graphtrain.torch_frontend import continuing as imported

        return imported.kv_cache_specs(_open(model), sequences, longest)
    return decode.kv_cache_specs(model, sequences, longest)


def decode_step(
    model: Model, parameters: Tree, kept: Tree, tokens: jax.Array, begin: jax.Array
) -> tuple[jax.Array, Tree]:
    """Run one decode step; return logits (batch, seq, vocab) and the updated KV cache.

    Args:
        model: settings.
        parameters: weights.
        kept: KV cache of the previous tokens, as described by kv_cache_specs.
        tokens: the next token ids, (batch, seq).
        begin: cache offset, the position of the first of these tokens.
    """
    if is_imported(model):
        from graphtrain.torch_frontend import continuing as imported

        return imported.decode_step(_open(model), parameters, kept, tokens, begin)
    return decode.decode_step(model, parameters, kept, tokens, begin)


def _open(model: Any) -> Any:
    from graphtrain.torch_frontend.versions import check_versions, installed

    # Before an import fails with an obscure error.
    check_versions(installed(), hf=model.hf is not None)
    from graphtrain.torch_frontend.model import open_model

    return open_model(model)
