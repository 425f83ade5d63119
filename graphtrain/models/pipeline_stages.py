"""Decoder as a pipeline: storage of its layers by stage, and what each stage computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graphtrain.config.schema import Model
from graphtrain.models.ahead import DOCUMENTS, EMBEDDED, TARGETS, WEIGHTS
from graphtrain.models.attention.segment_mask import isolate_documents
from graphtrain.models.block import (
    RESIDUAL_AXES,
    apply_stack,
    constrain_residual,
    gather_residual,
    global_attention_layers,
    layer_keys,
    split_key,
)
from graphtrain.models.decoder import Decoder, Parameters, merge
from lowering.pipeline.schedule import Pipeline
from lowering.tracing.recording import record
from lowering.trees import Tree
from sharding_rules.arrays import ArraySpec
from sharding_rules.pipeline import Stages

# (logits, microbatch) -> (objective to minimize, values to report)
LossFunction = Callable[[jax.Array, Tree], tuple[jax.Array, Any]]
# (input of the LM head, its weights, microbatch) -> as LossFunction
HeadLossFunction = Callable[[jax.Array, jax.Array, Tree], tuple[jax.Array, Any]]
_FIRST = ("embedding", "dense_layers")  # parameters before the stages
Keys = Callable[[jax.Array], jax.Array]  # microbatch index -> dropout key


def layers_to_rows(array: jax.Array, stages: Stages) -> jax.Array:
    """Store layers for stages: (rounds, stages x depth, ...), without the first axis if rounds = 1.

    The axis of stages x depth is sharded over the stages, so that no layer ever moves. Read row by
    row, the layers are in order, with rows of zeros where a chunk has fewer layers than `depth`.
    """
    rows = [stages.rows.index(layer) for layer in range(sum(stages.layers))]
    if len(rows) < len(stages.rows):
        padded = jnp.zeros((len(stages.rows), *array.shape[1:]), array.dtype)
        array = padded.at[np.array(rows)].set(array)
    return array.reshape(*_leading(stages), *array.shape[1:])


def row_spec(spec: ArraySpec, stages: Stages) -> ArraySpec:
    """Return the ArraySpec of layers_to_rows."""
    leading = _leading(stages)
    names = ("virtual_stages", "layers")[-len(leading) :]
    return replace(spec, shape=(*leading, *spec.shape[1:]), axes=(*names, *spec.axes[1:]))


def to_pipeline_layout(parameters: Parameters, stages: Stages) -> dict[str, Any]:
    """Return the decoder's parameters with the layers stored for stages."""
    layers = jax.tree.map(lambda array: layers_to_rows(array, stages), parameters["layers"])
    return {**parameters, "layers": layers}


def pipeline_specs(specs: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Return the ArraySpecs of arrange's result."""
    return {**specs, "layers": jax.tree.map(lambda spec: row_spec(spec, stages), specs["layers"])}


def layers_of_chunk(stages: Stages, chunk: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Return the layer in each row of a chunk, and whether the row is a layer.

    Rows of zeros, which pad shorter chunks, have the index of some layer. Without such rows, the
    second result is None.
    """
    first_layer = jnp.array(np.cumsum((0, *stages.layers[:-1])))[chunk]
    layers = first_layer + jnp.arange(stages.rows_per_chunk)
    is_layer = layers < first_layer + jnp.array(stages.layers)[chunk]
    last = sum(stages.layers) - 1
    return jnp.minimum(layers, last), is_layer if stages.padding_fraction else None


def _leading(stages: Stages) -> tuple[int, ...]:
    rows = stages.stages * stages.rows_per_chunk
    return (stages.rounds, rows) if stages.rounds > 1 else (rows,)


def decoder_pipeline(
    model: Model,
    stages: Stages,
    score: LossFunction,
    keys: Keys | None,
    term_weight: jax.Array | float,
    score_head: HeadLossFunction | None = None,
) -> Pipeline:
    """Build the decoder's pipeline: embedding, stages of layers, final norm with LM head.

    Each layer has the same dropout mask as without a pipeline.

    Args:
        model: Settings.
        stages: Division of the layers.
        score: Loss function of logits and microbatch.
        keys: Dropout key of each microbatch; without it there is no dropout.
        term_weight: Weight of the terms of one microbatch's layers.
        score_head: Loss function with the LM head, in place of `score`.
    """

    def keys_of(microbatch_index: jax.Array) -> tuple[Any, Any]:
        return split_key(None if keys is None else keys(microbatch_index))

    def embed_stage(weights: Tree, microbatch: Tree, microbatch_index: jax.Array) -> jax.Array:
        embedding_key = keys_of(microbatch_index)[0]
        return merge(model, weights).before_layers(microbatch["tokens"], embedding_key)

    def layer_stage(
        rows: Tree, x: jax.Array, microbatch_index: jax.Array, chunk: jax.Array
    ) -> tuple[Any, Any, Any]:
        drop, full = layer_keys(model, keys_of(microbatch_index)[1]), global_attention_layers(model)
        layer_indices, is_layer = layers_of_chunk(stages, chunk)
        x, terms = apply_stack(
            model,
            merge(model, rows).layers,
            x,
            None if drop is None else drop[layer_indices],
            is_layer,
            None if full is None else full[layer_indices],
        )
        return x, *jax.tree.map(lambda term: term * term_weight, terms)

    def loss_stage(weights: Tree, x: jax.Array, microbatch: Tree) -> tuple[jax.Array, Any]:
        decoder = merge(model, weights)
        normed = record("final_norm", decoder.final_norm(x), *RESIDUAL_AXES)
        if score_head is not None:
            with jax.named_scope("head"):
                hidden, head = gather_residual(normed), decoder.head_weights()
            return score_head(hidden, head, microbatch)
        hidden, head = decoder.head_operands(normed)
        logits = record("logits", decoder.logits(hidden, head), "batch", "seq", "vocab")
        result = score(logits, microbatch)
        if EMBEDDED not in microbatch:
            return result
        return _with_ahead(decoder, normed, head, microbatch, score, term_weight, result)

    def embed_next(weights: Tree, microbatch: Tree) -> Tree:
        return _arrays_ahead(merge(model, weights), microbatch)

    return Pipeline(
        embed_stage,
        layer_stage,
        loss_stage,
        virtual_stages=stages.rounds,
        mixes_sequences=model.moe is not None,
        splits_positions=True,
        beside=embed_next if model.ahead_layers else None,
    )


def _arrays_ahead(decoder: Decoder, microbatch: Tree) -> Tree:
    """Return what multi-token prediction needs of a microbatch in the last part of a pipeline.

    The embedding is outside of the loop over ticks, as that of the tokens. An evaluation has none.
    """
    if TARGETS not in microbatch:
        return {}
    documents = microbatch.get("documents")
    with isolate_documents(documents):
        arrays = {EMBEDDED: constrain_residual(decoder.embedding(microbatch["targets"]))}
    return arrays if documents is None else {**arrays, DOCUMENTS: documents}


def _with_ahead(
    decoder: Decoder,
    hidden: jax.Array,
    head: jax.Array,
    microbatch: Tree,
    score: LossFunction,
    term_weight: jax.Array | float,
    result: tuple[jax.Array, Any],
) -> tuple[jax.Array, Any]:
    """Return objective and metrics with those of multi-token prediction, as losses_ahead does.

    Args:
        decoder: Parameters of the last part.
        hidden: Normed hidden states (batch, seq, embed).
        head: Weights of the LM head, from head_operands.
        microbatch: Arrays of the microbatch, with those of _arrays_ahead.
        score: Loss function.
        term_weight: Weight of the terms of the module's block.
        result: Objective and metrics of the next token.
    """
    (objective, reported), weight = result, decoder.model.mtp_loss_weight
    assert weight is not None
    with isolate_documents(microbatch.get(DOCUMENTS)):
        ahead, terms = decoder.ahead(hidden, microbatch[EMBEDDED])
    later = {**microbatch, "targets": microbatch[TARGETS], "weights": microbatch[WEIGHTS]}
    objective_ahead, of_ahead = score(decoder.logits(gather_residual(ahead), head), later)
    of_block = sum(terms.losses.values()) * term_weight
    total = objective + weight * objective_ahead + of_block
    return total, {**reported, "mtp_loss": of_ahead["loss"]}


def split_for_pipeline(model: Model, parameters: Parameters) -> Tree:
    """Divide parameters as Pipeline requires: first, stages, last; a tied head is in two parts.

    Dense layers before those of a mixture are in the first, with the embedding: every stage runs
    its share of the microbatches through them. Beside an adapter, only some of the parameters are
    trained, and only some are frozen. The module of multi-token prediction is in the last.
    """
    head = "embedding" if model.tie_word_embeddings else "head"
    last = ("final_norm", head, "ahead")
    parts = {"first": _FIRST, "stages": ("layers",), "last": last}
    return {
        part: {name: parameters[name] for name in names if name in parameters}
        for part, names in parts.items()
    }


def merge_gradients(gradients: Tree) -> Tree:
    """Return the gradients before split_for_pipeline; those of a tied head are summed."""
    first, last = gradients["first"], gradients["last"]
    merged = {**gradients["stages"], **first, **last}
    if "embedding" in first and "embedding" in last:
        merged["embedding"] = jax.tree.map(jnp.add, first["embedding"], last["embedding"])
    return merged


def split_batch(batch: Tree, stages: int, devices: int) -> Tree:
    """Split a microbatch into several, so that stages work at the same time; pad with empty ones.

    Args:
        batch: Arrays (sequences, seq); a weight of 0 masks a target, as in empty microbatches.
        stages: The number of microbatches is a multiple of it.
        devices: The number of sequences in each is a multiple of it.
    """
    sequences = len(batch["tokens"])
    microbatches = math.gcd(sequences // devices, stages) if sequences % devices == 0 else 1

    def split(array: jax.Array) -> jax.Array:
        array = array.reshape(microbatches, sequences // microbatches, *array.shape[1:])
        empty = jnp.zeros((-microbatches % stages, *array.shape[1:]), array.dtype)
        return jnp.concatenate([array, empty])

    return jax.tree.map(split, batch)
