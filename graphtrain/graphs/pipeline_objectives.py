"""Pipelines of a training step and of an evaluation: cross-entropy, or DPO over pairs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.graphs.gradient_sums import gradients_in_place
from graphtrain.graphs.loss_scale import loss_scale, scaled
from graphtrain.graphs.objectives import loss_head
from graphtrain.graphs.open_model import open_language_model
from graphtrain.graphs.pipeline_weights import (
    preference_pipeline,
    reference_pipeline,
    with_adapter,
)
from graphtrain.graphs.preference import answer_score, pair_count, pipelined_dpo
from graphtrain.graphs.token_loss import weighted_loss
from graphtrain.models.ahead import WEIGHTS
from graphtrain.models.attention.segment_mask import isolate_documents
from graphtrain.models.chunk_size import loss_chunk
from graphtrain.models.chunked_loss import chunked_cross_entropy
from graphtrain.models.pipeline_stages import HeadLossFunction, Keys, LossFunction
from lowering.pipeline.schedule import PartWeights, Pipeline
from lowering.tracing.constrain import constrain
from lowering.trees import Tree
from sharding_rules.pipeline import Stages


def training_pipeline(
    program: ResolvedProgram, stages: Stages, state: Tree, batch: Tree, key: jax.Array
) -> tuple[Pipeline, Tree]:
    """Return the pipeline of a training step, and its batch with the weights of the objective.

    Objective and metrics are multiplied by the loss scale, if there is one.

    Args:
        program: Settings.
        stages: Division of the layers.
        state: Training state.
        batch: Arrays (microbatches, batch, seq).
        key: Random key of the step, for dropout.
    """
    scale, adapter = loss_scale(program, state), program.adapter
    adapter_has_dropout = adapter is not None and bool(adapter.dropout)
    has_dropout = adapter_has_dropout or open_language_model(program.model).has_dropout

    def microbatch_key(index: jax.Array) -> jax.Array:
        return jax.random.fold_in(key, index)

    keys = microbatch_key if has_dropout else None
    term_weight = scaled(1 / program.batch.microbatches, scale)
    if program.loss.kind == "dpo":
        pair_weight = scaled(1 / jnp.maximum(pair_count(batch["weights"]), 1.0), scale)
        is_shared = program.pipeline.schedule == "1f1b"
        weights = term_weight, pair_weight
        pipeline = _preference(program, stages, keys, weights, batch["tokens"], is_shared)
    else:
        total = jnp.maximum(batch["weights"].sum(), 1.0)
        weights = {name: batch[name] for name in ("weights", WEIGHTS) if name in batch}
        batch = {**batch, **{name: scaled(x / total, scale) for name, x in weights.items()}}
        pipeline = _cross_entropy(program, stages, keys, term_weight, batch["tokens"])
    recompute = program.pipeline.recomputes_stages(program.model.remat)
    return _isolating_documents(replace(pipeline, remat=recompute), batch)


def evaluation_pipeline(
    program: ResolvedProgram, stages: Stages, batch: Tree
) -> tuple[Pipeline, Tree]:
    """Return the pipeline of an evaluation, and the batch for it; without dropout.

    Its metric is the loss, summed over targets or pairs.

    Args:
        program: Settings.
        stages: Division of the layers.
        batch: Arrays of all microbatches (microbatches, batch, seq).
    """
    if program.loss.kind == "dpo":
        # Forward passes alone follow gpipe or circular, in which no stages share positions.
        pipeline = _preference(program, stages, None, (1.0, 1.0), batch["tokens"], False)
    else:
        pipeline = _cross_entropy(program, stages, None, 1.0, batch["tokens"])
    return _isolating_documents(pipeline, batch)


def _isolating_documents(pipeline: Pipeline, batch: Tree) -> tuple[Pipeline, Tree]:
    """Let embedding and stages isolate the documents of a batch, if it has any.

    Every device gets the segment ids of its sequences once, before the loop over ticks.
    """
    if "documents" not in batch:
        return pipeline, batch
    documents = constrain(batch["documents"], "microbatch", "batch", None)

    def first(weights: PartWeights, microbatch: Tree, index: jax.Array) -> jax.Array:
        with isolate_documents(microbatch["documents"]):
            return pipeline.first(weights, microbatch, index)

    def stage_context(arrays: Tree) -> AbstractContextManager:
        return isolate_documents(arrays["documents"])

    isolating = replace(
        pipeline, first=first, read_by_stages=("documents",), stage_context=stage_context
    )
    return isolating, {**batch, "documents": documents}


def _cross_entropy(
    program: ResolvedProgram,
    stages: Stages,
    keys: Keys | None,
    term_weight: jax.Array | float,
    tokens: jax.Array,
) -> Pipeline:
    def score(logits: jax.Array, microbatch: Tree) -> tuple[jax.Array, Any]:
        targets, weights = microbatch["targets"], microbatch["weights"]
        objective, loss = weighted_loss(program.loss, logits, targets, weights)
        return objective, {"loss": loss}

    chunk = loss_chunk(program) if open_language_model(program.model).has_separate_head else None
    if chunk is None:
        return _of_policy(program, stages, score, keys, term_weight, tokens)
    settings = loss_head(program, chunk)

    def score_chunks(hidden: jax.Array, head: jax.Array, microbatch: Tree) -> tuple[Any, Any]:
        targets, weights = microbatch["targets"], microbatch["weights"]
        objective, loss = chunked_cross_entropy(hidden, head, targets, weights, settings)
        return objective, {"loss": loss}

    return _of_policy(program, stages, score, keys, term_weight, tokens, score_chunks)


def _preference(
    program: ResolvedProgram,
    stages: Stages,
    keys: Keys | None,
    weights: tuple[jax.Array | float, jax.Array | float],
    tokens: jax.Array,
    shared_by_stages: bool,
) -> Pipeline:
    """Return the pipeline through which policy and reference model pass together.

    Args:
        program: Settings.
        stages: Division of the layers.
        keys: Dropout key of each microbatch; without it there is no dropout.
        weights: Those of the terms of one microbatch's layers, and of each pair.
        tokens: Token ids of all microbatches.
        shared_by_stages: Whether stages share the positions of a loss.
    """
    term_weight, pair_weight = weights

    def prefer(log_ratio: jax.Array, microbatch: Tree) -> tuple[jax.Array, Any]:
        sums = pipelined_dpo(
            log_ratio, microbatch["weights"], program.loss, shared_by_stages=shared_by_stages
        )
        metrics = {name: total * pair_weight for name, total in sums.items()}
        return metrics["loss"], metrics

    policy = _of_policy(program, stages, answer_score, keys, term_weight, tokens)
    model = open_language_model(program.model)
    reference = model.pipeline(stages, answer_score, None, 0.0, tokens)
    return preference_pipeline(policy, reference_pipeline(reference, program), prefer)


def _of_policy(
    program: ResolvedProgram,
    stages: Stages,
    score: LossFunction,
    keys: Keys | None,
    term_weight: jax.Array | float,
    tokens: jax.Array,
    score_head: HeadLossFunction | None = None,
) -> Pipeline:
    """Return the pipeline of the model that is trained; its adapter has the model's keys."""
    model = open_language_model(program.model)
    model_keys = keys if model.has_dropout else None
    pipeline = model.pipeline(stages, score, model_keys, term_weight, tokens, score_head)
    in_place = gradients_in_place(program, has_chunks=score_head is not None)
    return with_adapter(replace(pipeline, in_place=in_place), program, stages, keys)
