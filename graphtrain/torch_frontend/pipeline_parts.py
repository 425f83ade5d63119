"""An imported model split into pipeline stages.

The three parts (before the stages, a stage of blocks, after the stages) each call the module's own
forward pass and stop it where the part ends. A stage therefore computes the other arguments of its
blocks (masks, rotary tables) as the module does, from the tokens; the layers before the blocks are
traced again for that, and the compiler removes what no block uses. Those arguments must not depend
on weights, because a stage computes no gradient for them.

`staged_blocks` says which blocks the stages divide. Scans over the others run in the part that they
are in, and only draw their dropout keys in the other parts, so that blocks in all parts have the
dropout masks that they have without stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graphtrain.models.layer_terms import NO_TERMS
from graphtrain.models.lora.trainable import weight_path
from graphtrain.models.pipeline_stages import (
    Keys,
    LossFunction,
    layers_of_chunk,
    layers_to_rows,
    row_spec,
)
from graphtrain.torch_frontend.dependencies import Dependencies, find_dependencies
from graphtrain.torch_frontend.model import OpenedModel
from graphtrain.torch_frontend.partial_runs import run_after_stages, run_until_stages
from graphtrain.torch_frontend.scan import Scan, constrain_residual
from graphtrain.torch_frontend.staged_blocks import StagedBlocks, cannot_split
from lowering.pipeline.ring import read_slot
from lowering.pipeline.schedule import Pipeline, StageResult
from lowering.tracing.constrain import draw_shard, placement
from lowering.tracing.recording import record, recording_later
from lowering.trees import Tree, flatten, unflatten
from sharding_rules.arrays import ArraySpec
from sharding_rules.pipeline import Stages

_TOKENS = (2, 4)  # (batch, seq) of the traces that find dependencies

Arrays = dict[str, Any]


@dataclass(frozen=True)
class PipelineParts:
    """Paths of the parameters that each part of a pipeline reads.

    A tied weight is in two parts. The gradient of a weight in no part is zero.
    """

    blocks: StagedBlocks
    first: frozenset[str]
    stages: frozenset[str]
    last: frozenset[str]
    arguments_depend_on_tokens: (
        bool  # arguments of blocks other than the hidden state depend on the tokens
    )

    def split_parameters(self, parameters: Tree) -> Tree:
        """Split parameters into the parts "first", "stages" and "last" of a Pipeline."""
        arrays = flatten(parameters)
        paths = {"first": self.first, "stages": self.stages, "last": self.last}
        return {
            part: unflatten(
                {path: array for path, array in arrays.items() if weight_path(path) in inside}
            )
            for part, inside in paths.items()
        }

    def merge_gradients(self, gradients: Tree, parameters: Tree) -> Tree:
        """Merge gradients of the parts into the tree of `parameters`; tied weights are summed."""

        def total(path: str, array: jax.Array) -> jax.Array:
            parts = [part[path] for part in by_path if path in part]
            return reduce(jnp.add, parts) if parts else jnp.zeros_like(array)

        by_path = [flatten(part) for part in gradients.values() if part]
        return unflatten({path: total(path, array) for path, array in flatten(parameters).items()})


def to_stage_order(opened: OpenedModel, parameters: Tree, stages: Stages) -> Tree:
    """Reorder the layer rows of parameters, or of their specs, for pipeline stages.

    Raises:
        ShardingError: the model cannot be split into these stages.
    """
    parts = parts_of(opened)
    rows = parts.blocks.rows(stages)

    def store(path: str, array_or_spec: Any) -> Any:
        is_spec, is_staged = isinstance(array_or_spec, ArraySpec), weight_path(path) in parts.stages
        if is_staged:
            return row_spec(array_or_spec, rows) if is_spec else layers_to_rows(array_or_spec, rows)
        if is_spec and array_or_spec.axes[:1] == ("layers",):
            # Every stage has all blocks outside of stages.
            return replace(array_or_spec, axes=("unstaged_layers", *array_or_spec.axes[1:]))
        return array_or_spec

    return unflatten(
        {path: store(path, array_or_spec) for path, array_or_spec in flatten(parameters).items()}
    )


@cache
def parts_of(opened: OpenedModel) -> PipelineParts:
    """Trace a model to find the parameters used before, in and after its stages; once per model.

    Raises:
        ShardingError: the model cannot be split into stages; the message says why.
    """
    blocks = StagedBlocks.of(opened)
    stack = blocks.stack
    if opened.balance is not None:
        raise cannot_split("the loss of output_router_logits balances experts over all blocks")
    arrays = {
        path: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for path, spec in opened.specs().items()
    }
    key = jax.eval_shape(lambda: jax.random.key(0))
    module_inputs = arrays, jax.ShapeDtypeStruct(_TOKENS, jnp.int32), key

    def dependencies_at_stages(get_value: Callable[[Scan], Any]) -> Dependencies:
        return find_dependencies(
            lambda arrays, tokens, key: run_until_stages(
                opened, blocks, arrays, tokens, key, get_value
            ),
            *module_inputs,
        )

    before, arguments = (
        dependencies_at_stages(lambda scan: scan.hidden),
        dependencies_at_stages(lambda scan: scan.block_arguments()),
    )
    x = before.results[0]
    if len(x.shape) != 3 or x.shape[:2] != _TOKENS:
        raise cannot_split(
            f"for tokens of shape {_TOKENS}, its blocks get a hidden state of shape {x.shape}, not "
            "(2, 4, width)"
        )
    if arguments.weights or arguments.key:
        dependency = ", ".join(sorted(arguments.weights)) or "dropout"
        raise cannot_split(
            f"the blocks of {stack.name} get an argument that depends on {dependency}"
        )

    def logits_after_blocks(arrays: Arrays, tokens: jax.Array, key: jax.Array) -> jax.Array:
        x_after = jnp.zeros(x.shape, x.dtype)
        return run_after_stages(opened, blocks, arrays, x_after, tokens, key)

    last = find_dependencies(logits_after_blocks, *module_inputs)
    if last.tokens or last.key:
        dependency = "the tokens" if last.tokens else "dropout"
        raise cannot_split(f"the computation after {stack.name} depends on {dependency}")
    if not blocks.after:
        _check_by_position(opened, blocks, sorted(last.weights), x)
    stages = frozenset(path for path in arrays if blocks.is_in_stages(path))
    return PipelineParts(blocks, before.weights, stages, last.weights, arguments.tokens)


def _check_by_position(opened: OpenedModel, blocks: StagedBlocks, names: list[str], x: Any) -> None:
    """Refuse heads that mix positions; in 1F1B each stage computes the loss of some positions.

    Models of transformers are not checked: after their blocks is only a norm and an LM head.
    """
    if opened.settings.hf is not None:
        return
    specs, draw = opened.specs(), np.random.default_rng(0).standard_normal
    weights = {name: jnp.asarray(draw(specs[name].shape, np.float32)) for name in names}
    tokens, x = jnp.zeros(_TOKENS, jnp.int32), jnp.asarray(draw(x.shape, np.float32), x.dtype)
    full_logits = run_after_stages(opened, blocks, weights, x, tokens)
    half_logits = [
        run_after_stages(opened, blocks, weights, x[:, offset::2], tokens[:, offset::2])
        for offset in (0, 1)
    ]
    if not all(
        jnp.allclose(full_logits[:, offset::2], half_logits[offset], 1e-2, 1e-2)
        for offset in (0, 1)
    ):
        raise cannot_split("the computation after its blocks mixes positions")


def imported_pipeline(
    opened: OpenedModel, stages: Stages, score: LossFunction, keys: Keys | None, tokens: jax.Array
) -> Pipeline:
    """Build the Pipeline of a model: what each part computes of one microbatch.

    On one replica, each block applies the same dropout masks as without stages.

    Args:
        opened: a model that can be split into stages.
        stages: number of blocks in each stage.
        score: loss function, of logits and a microbatch.
        keys: dropout key by microbatch; None disables dropout.
        tokens: token ids of all microbatches, (microbatches, sequences, seq).

    Raises:
        ShardingError: the model cannot be split into stages.
    """
    parts = parts_of(opened)
    blocks, row_stages = parts.blocks, parts.blocks.rows(stages)

    def microbatch_key(number: jax.Array) -> jax.Array | None:
        return None if keys is None else _replica_key(keys(number))

    def first(weights: Tree, microbatch: Tree, number: jax.Array) -> jax.Array:
        inputs = microbatch["tokens"], microbatch_key(number)
        arrays = flatten(weights)
        return constrain_residual(
            run_until_stages(opened, blocks, arrays, *inputs, lambda scan: scan.hidden)
        )

    def stage(rows: Tree, x: jax.Array, number: jax.Array, chunk: jax.Array) -> StageResult:
        row_indices, is_row = layers_of_chunk(row_stages, chunk)

        def run_blocks(scan: Scan) -> jax.Array:
            begin_recording()
            arrays = blocks.stack.rows_by_name(opened.cast_parameters(flatten(rows)))
            return scan.scan_rows(x, arrays, scan.keys()[row_indices], is_row)

        shape = x.shape[:2]
        stage_tokens = jnp.zeros(shape, jnp.int32)
        if parts.arguments_depend_on_tokens:
            stage_tokens = draw_shard(lambda _: read_slot(tokens, number), shape, "batch", "seq")
        inputs = stage_tokens, microbatch_key(number)
        with recording_later() as begin_recording:
            out = run_until_stages(opened, blocks, {}, *inputs, run_blocks, runs_before=False)
        return out, NO_TERMS.losses, NO_TERMS.metrics

    def last(weights: Tree, x: jax.Array, microbatch: Tree) -> tuple[jax.Array, Any]:
        unused_tokens, unused_key = jnp.zeros(x.shape[:2], jnp.int32), jax.random.key(0)
        key = None if keys is None else unused_key
        out = run_after_stages(opened, blocks, flatten(weights), x, unused_tokens, key)
        return score(record("logits", out, "batch", "seq", "vocab"), microbatch)

    return Pipeline(
        first,
        stage,
        last,
        virtual_stages=stages.rounds,
        last_mixes_positions=bool(blocks.after),
    )


def _replica_key(key: jax.Array) -> jax.Array:
    """Fold the replica's index into a dropout key, where replicas are split manually."""
    current_placement = placement()
    if current_placement is None or current_placement.unrestricted_rules is None:
        return key
    batch_axes = current_placement.unrestricted_rules.activations.get("batch", ())
    replica_axes = tuple(name for name in current_placement.manual if name in batch_axes)
    return jax.random.fold_in(key, jax.lax.axis_index(replica_axes)) if replica_axes else key
