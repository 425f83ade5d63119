"""An imported model split into pipeline stages.

The three parts (before the blocks, a stage of blocks, after the blocks) each call the module's own
forward pass and stop it where the part ends. A stage therefore computes the other arguments of its
blocks (masks, rotary tables) as the module does, from the tokens; the layers before the blocks are
traced again for that, and the compiler removes what no block uses. Those arguments must not depend
on weights, because a stage computes no gradient for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
from graphtrain.torch_frontend.blocks import Stack, UnrolledBlocks, list_lengths
from graphtrain.torch_frontend.model import OpenedModel
from graphtrain.torch_frontend.scan_blocks import Scan, ScanHooks, StopForward, constrain_residual
from lowering.pipeline.ring import read_slot
from lowering.pipeline.schedule import Pipeline, StageResult
from lowering.tracing.constrain import draw_shard, placement
from lowering.tracing.recording import record, recording_later
from lowering.trees import Tree, flatten, unflatten
from sharding_rules.arrays import ArraySpec
from sharding_rules.errors import ShardingError
from sharding_rules.pipeline import Stages

_TOKENS = (2, 4)  # (batch, seq) of the traces that find dependencies

Arrays = dict[str, Any]


@dataclass(frozen=True)
class PipelineParts:
    """Paths of the parameters that each part of a pipeline reads.

    A tied weight is in two parts. The gradient of a weight in no part is zero.
    """

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
    parts, (stack,) = parts_of(opened), opened.stacks
    if stack.count != sum(stages.layers):
        raise ShardingError(
            f"{stack.name} has {stack.count} blocks, but the stages hold {sum(stages.layers)}; set "
            "program.pipeline.layers_per_stage to the number of blocks in each stage"
        )

    def store(path: str, array_or_spec: Any) -> Any:
        if weight_path(path) not in parts.stages:
            return array_or_spec
        return (
            row_spec(array_or_spec, stages)
            if isinstance(array_or_spec, ArraySpec)
            else layers_to_rows(array_or_spec, stages)
        )

    return unflatten(
        {path: store(path, array_or_spec) for path, array_or_spec in flatten(parameters).items()}
    )


@cache
def parts_of(opened: OpenedModel) -> PipelineParts:
    """Trace a model to find the parameters used before, in and after its blocks; once per model.

    Raises:
        ShardingError: the model cannot be split into stages; the message says why.
    """
    stack = _only_stack(opened)
    if opened.balance is not None:
        raise _cannot_split("the loss of output_router_logits balances experts over all blocks")
    arrays = {
        path: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for path, spec in opened.specs().items()
    }
    key = jax.eval_shape(lambda: jax.random.key(0))
    module_inputs = arrays, jax.ShapeDtypeStruct(_TOKENS, jnp.int32), key

    def dependencies_at_blocks(get_value: Callable[[Scan], Any]) -> _Dependencies:
        return _find_dependencies(
            lambda arrays, tokens, key: _run_until_blocks(opened, arrays, tokens, key, get_value),
            *module_inputs,
        )

    before, arguments = (
        dependencies_at_blocks(lambda scan: scan.hidden),
        dependencies_at_blocks(lambda scan: scan.block_arguments()),
    )
    x = before.results[0]
    if len(x.shape) != 3:
        raise _cannot_split(f"its blocks get a hidden state of shape {x.shape}, not (2, 4, width)")
    if arguments.weights or arguments.key:
        dependency = ", ".join(sorted(arguments.weights)) or "dropout"
        raise _cannot_split(
            f"the blocks of {stack.name} get an argument that depends on {dependency}"
        )

    def logits_after_blocks(arrays: Arrays, tokens: jax.Array, key: jax.Array) -> jax.Array:
        return _run_after_blocks(opened, arrays, jnp.zeros(x.shape, x.dtype), tokens, key)

    last = _find_dependencies(logits_after_blocks, *module_inputs)
    if last.tokens or last.key:
        dependency = "the tokens" if last.tokens else "dropout"
        raise _cannot_split(f"the computation after {stack.name} depends on {dependency}")
    _check_by_position(opened, sorted(last.weights), x)
    stages = frozenset(path for path in arrays if opened.is_stacked(path))
    return PipelineParts(before.weights, stages, last.weights, arguments.tokens)


def _check_by_position(opened: OpenedModel, names: list[str], x: Any) -> None:
    """Refuse heads that mix positions; in 1F1B each stage computes the loss of some positions.

    Models of transformers are not checked: after their blocks is only a norm and an LM head.
    """
    if opened.settings.hf is not None:
        return
    specs, draw = opened.specs(), np.random.default_rng(0).standard_normal
    weights = {name: jnp.asarray(draw(specs[name].shape, np.float32)) for name in names}
    tokens, x = jnp.zeros(_TOKENS, jnp.int32), jnp.asarray(draw(x.shape, np.float32), x.dtype)
    full_logits = _run_after_blocks(opened, weights, x, tokens)
    half_logits = [
        _run_after_blocks(opened, weights, x[:, offset::2], tokens[:, offset::2])
        for offset in (0, 1)
    ]
    if not all(
        jnp.allclose(full_logits[:, offset::2], half_logits[offset], 1e-2, 1e-2)
        for offset in (0, 1)
    ):
        raise _cannot_split("the computation after its blocks mixes positions")


def _only_stack(opened: OpenedModel) -> Stack:
    """Return the only stack of the model, which the stages divide."""
    if not opened.block_lists:
        raise _cannot_split("its blocks are not in a torch.nn.ModuleList")
    for block_list in opened.block_lists:
        if isinstance(block_list, UnrolledBlocks):
            raise _cannot_split(
                f"{block_list.name} is traced block by block, because {block_list.reason}"
            )
    names = list(list_lengths(opened.block_lists))
    if len(names) > 1:
        raise _cannot_split(
            f"its blocks are in several lists ({' and '.join(names)}), and stages can divide only "
            "one"
        )
    if len(opened.block_lists) > 1:
        first, second, *_ = opened.stacks
        raise _cannot_split(
            f"the blocks of {names[0]} differ: those from {second.start} on are unlike those from "
            f"{first.start} on, but stages need identical blocks"
        )
    (stack,) = opened.stacks
    if stack.period > 1:
        raise _cannot_split(
            f"the blocks of {stack.name} repeat only every {stack.period} blocks, but stages need "
            "identical blocks"
        )
    return stack


def _cannot_split(reason: str) -> ShardingError:
    return ShardingError(
        f"this model cannot be split into pipeline stages: {reason}; set program.mesh.stage = 1 "
        "and split it over fsdp or tensor"
    )


@dataclass(frozen=True)
class _Dependencies:
    """Inputs that the results of a function depend on."""

    weights: frozenset[str]
    tokens: bool
    key: bool
    results: list[Any]  # shapes and dtypes of the results


def _find_dependencies(
    function: Callable[..., Any], arrays: Arrays, tokens: Any, key: Any
) -> _Dependencies:
    """Trace a function of weights, tokens and a key, and find the inputs its results depend on.

    Every result of an equation is taken to depend on all of its inputs.
    """
    program, results = jax.make_jaxpr(function, return_shape=True)(arrays, tokens, key)
    needed = {id(variable) for variable in program.jaxpr.outvars}
    for equation in reversed(program.jaxpr.eqns):
        if any(id(variable) in needed for variable in equation.outvars):
            needed |= {id(variable) for variable in equation.invars}
    *weights, uses_tokens, uses_key = (id(variable) in needed for variable in program.jaxpr.invars)
    names = [name for name, is_needed in zip(sorted(arrays), weights, strict=True) if is_needed]
    return _Dependencies(frozenset(names), uses_tokens, uses_key, jax.tree.leaves(results))


def _run_until_blocks(
    opened: OpenedModel,
    arrays: Arrays,
    tokens: jax.Array,
    key: jax.Array | None,
    get_value: Callable[[Scan], Any],
) -> Any:
    """Call the module up to its first block, and return `get_value` of its scan."""

    def stop_at_blocks(scan: Scan) -> None:
        raise StopForward(get_value(scan))

    try:
        opened.run(
            _all_weights(opened, arrays), tokens, key, ScanHooks(before_blocks=stop_at_blocks)
        )
    except StopForward as stop:
        return stop.value
    raise AssertionError("the module returned before its first block")


def _run_after_blocks(
    opened: OpenedModel,
    arrays: Arrays,
    x: jax.Array,
    tokens: jax.Array,
    key: jax.Array | None = None,
) -> jax.Array:
    """Compute logits from x, the hidden state after the last block."""
    with recording_later() as begin_recording:

        def run_blocks(scan: Scan) -> jax.Array:
            begin_recording()
            return x

        hooks = ScanHooks(run_blocks=run_blocks)
        return opened.finish_logits(
            opened.run(_all_weights(opened, arrays), tokens, key, hooks), tokens
        )


def _all_weights(opened: OpenedModel, weights: Arrays) -> Arrays:
    """Return all weights in the dtype of the computation; those not in `weights` as shapes."""
    specs = opened.specs()
    shapes = {
        path: jax.ShapeDtypeStruct(
            spec.shape, spec.dtype if "vocab" in spec.axes else opened.settings.dtype
        )
        for path, spec in specs.items()
    }
    return shapes | opened.cast_parameters(weights)


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

    def microbatch_key(number: jax.Array) -> jax.Array | None:
        return None if keys is None else _replica_key(keys(number))

    def first(weights: Tree, microbatch: Tree, number: jax.Array) -> jax.Array:
        inputs = microbatch["tokens"], microbatch_key(number)
        arrays = flatten(weights)
        return constrain_residual(
            _run_until_blocks(opened, arrays, *inputs, lambda scan: scan.hidden)
        )

    def stage(rows: Tree, x: jax.Array, number: jax.Array, chunk: jax.Array) -> StageResult:
        layer_indices, is_layer = layers_of_chunk(stages, chunk)

        def run_blocks(scan: Scan) -> jax.Array:
            begin_recording()
            arrays = scan.arrays_by_name(opened.cast_parameters(flatten(rows)))
            return scan.scan_rows(x, [arrays], scan.keys()[layer_indices], is_layer)

        shape = x.shape[:2]
        stage_tokens = jnp.zeros(shape, jnp.int32)
        if parts.arguments_depend_on_tokens:
            stage_tokens = draw_shard(lambda _: read_slot(tokens, number), shape, "batch", "seq")
        with recording_later() as begin_recording:
            out = _run_until_blocks(opened, {}, stage_tokens, microbatch_key(number), run_blocks)
        return out, NO_TERMS.losses, NO_TERMS.metrics

    def last(weights: Tree, x: jax.Array, microbatch: Tree) -> tuple[jax.Array, Any]:
        unused_tokens, unused_key = jnp.zeros(x.shape[:2], jnp.int32), jax.random.key(0)
        key = None if keys is None else unused_key
        out = _run_after_blocks(opened, flatten(weights), x, unused_tokens, key)
        return score(record("logits", out, "batch", "seq", "vocab"), microbatch)

    return Pipeline(first, stage, last, virtual_stages=stages.rounds)


def _replica_key(key: jax.Array) -> jax.Array:
    """Fold the replica's index into a dropout key, where replicas are split manually."""
    current_placement = placement()
    if current_placement is None or current_placement.unrestricted_rules is None:
        return key
    batch_axes = current_placement.unrestricted_rules.activations.get("batch", ())
    replica_axes = tuple(name for name in current_placement.manual if name in batch_axes)
    return jax.random.fold_in(key, jax.lax.axis_index(replica_axes)) if replica_axes else key
