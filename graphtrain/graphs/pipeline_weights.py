"""Pipelines with frozen weights: LoRA factors applied in each part, and DPO's reference model.

A pipeline of a model takes the model's parameters. The pipelines here take trained and frozen
weights, and build the parameters of a part where the part uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.graphs.open_model import open_language_model
from graphtrain.models.lora.trainable import LORA_A
from graphtrain.models.pipeline_stages import Keys, layers_of_chunk
from graphtrain.models.protocol import LanguageModel
from lowering.pipeline.schedule import PartWeights, Pipeline, Scalars, StageResult
from lowering.tracing.constrain import constrain
from lowering.tracing.recording import without_recording
from lowering.trees import Tree, flatten
from sharding_rules.errors import ShardingError
from sharding_rules.pipeline import Stages

# (log p of the policy minus that of the reference model, microbatch) -> (objective, metrics)
PreferenceFunction = Callable[[jax.Array, Tree], tuple[jax.Array, Scalars]]


def part_weights(model: LanguageModel, trained: Tree, frozen: Tree | None) -> Tree:
    """Return trained and frozen weights as the parts of a Pipeline."""
    parts = model.split_for_pipeline(trained)
    frozen_parts = model.split_for_pipeline(frozen) if frozen else {}
    return {part: PartWeights(tree, frozen_parts.get(part)) for part, tree in parts.items()}


def with_adapter(
    pipeline: Pipeline, program: ResolvedProgram, stages: Stages, keys: Keys | None
) -> Pipeline:
    """Return a model's pipeline that takes trained and frozen weights.

    Args:
        pipeline: Pipeline of the model.
        program: Settings.
        stages: Division of the layers.
        keys: Dropout key of each microbatch, for LoRA dropout; None disables it.

    Raises:
        ShardingError: while it is traced, if an array outside of the layers would have dropout.
    """
    model = open_language_model(program.model)
    row_stages = model.row_stages(stages)

    def combine(weights: PartWeights, index: Any = None, chunk: Any = None) -> Tree:
        key = layers = None
        if keys is not None and chunk is not None:
            key, (layers, _) = keys(index), layers_of_chunk(row_stages, chunk)
        elif keys is not None:
            _refuse_dropout(weights.trained)
        return model.apply_lora(program.settings, weights.trained, weights.frozen, key, layers)

    return _with_weights(pipeline, combine)


def _refuse_dropout(trained: Tree) -> None:
    """Refuse factors of arrays before or after the layers, which have no dropout here."""
    paths = flatten(trained) if trained else {}
    if adapted := [path for path in paths if path.endswith(f"/{LORA_A}")]:
        raise ShardingError(
            "in a pipeline, program.adapter.dropout is for arrays of the layers, and "
            f"{adapted[0].removesuffix(f'/{LORA_A}')} is in none; set dropout = 0, or leave it out "
            "of target_modules"
        )


def reference_pipeline(pipeline: Pipeline, program: ResolvedProgram) -> Pipeline:
    """Return a model's pipeline that takes the same weights, and uses the frozen ones alone."""
    model = open_language_model(program.model)

    def combine(weights: PartWeights, index: Any = None, chunk: Any = None) -> Tree:
        return model.reference_parameters(program.settings, weights.frozen)

    return _with_weights(pipeline, combine)


def _with_weights(pipeline: Pipeline, combine: Callable[..., Tree]) -> Pipeline:
    """Return a pipeline whose parts get the parameters that `combine` returns.

    Args:
        pipeline: Pipeline of a model.
        combine: Returns the parameters of a part, from its weights and, for a stage, the indices of
            microbatch and chunk.
    """

    def first(weights: PartWeights, microbatch: Tree, index: jax.Array) -> jax.Array:
        return pipeline.first(combine(weights), microbatch, index)

    def stage(
        weights: PartWeights, x: jax.Array, index: jax.Array, chunk: jax.Array
    ) -> StageResult:
        return pipeline.stage(combine(weights, index, chunk), x, index, chunk)

    def last(weights: PartWeights, x: jax.Array, microbatch: Tree) -> tuple[jax.Array, Scalars]:
        return pipeline.last(combine(weights), x, microbatch)

    def beside(weights: PartWeights, microbatch: Tree) -> Tree:
        assert pipeline.beside is not None
        return pipeline.beside(combine(weights), microbatch)

    return replace(
        pipeline,
        first=first,
        stage=stage,
        last=last,
        beside=None if pipeline.beside is None else beside,
    )


def preference_pipeline(
    policy: Pipeline, reference: Pipeline, prefer: PreferenceFunction
) -> Pipeline:
    """Return the pipeline in which each microbatch passes the policy and the reference model.

    Their residual streams are stacked: x is (batch, seq, 2, embed).

    Args:
        policy: Pipeline whose last part returns the log probability of each row's answer.
        reference: The same of the reference model.
        prefer: DPO's loss.
    """

    def both(of_policy: jax.Array, of_reference: jax.Array) -> jax.Array:
        x = jnp.stack([of_policy, jax.lax.stop_gradient(of_reference)], 2)
        return constrain(x, "batch", "residual", None, "embed")

    def first(weights: PartWeights, microbatch: Tree, index: jax.Array) -> jax.Array:
        x = policy.first(weights, microbatch, index)
        with without_recording():
            return both(x, reference.first(weights, microbatch, index))

    def stage(
        weights: PartWeights, x: jax.Array, index: jax.Array, chunk: jax.Array
    ) -> StageResult:
        y, terms, metrics = policy.stage(weights, x[:, :, 0], index, chunk)
        with without_recording():
            of_reference, *_ = reference.stage(weights, x[:, :, 1], index, chunk)
        return both(y, of_reference), terms, metrics

    def last(weights: PartWeights, x: jax.Array, microbatch: Tree) -> tuple[jax.Array, Scalars]:
        log_probs, _ = policy.last(weights, x[:, :, 0], microbatch)
        with without_recording():
            of_reference, _ = reference.last(weights, x[:, :, 1], microbatch)
        return prefer(log_probs - jax.lax.stop_gradient(of_reference), microbatch)

    return replace(policy, first=first, stage=stage, last=last)
