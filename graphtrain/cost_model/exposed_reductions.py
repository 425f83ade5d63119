"""Reductions of gradients for which a step waits, by arithmetic.

Others overlap with the backward pass of other layers. The LM head's gradient is reduced before the
backward pass of the layers begins (graphtrain/models/head_gradient.py): in blocks of the vocabulary
beside the product of the next block, else beside nothing. An MLP in blocks reduces the gradients of
a block beside the products of the next one's hidden values, and those of the last block, on TPUs
those of each, beside nothing (graphtrain/models/mlp_blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.gradient_traffic import gradient_collectives
from graphtrain.cost_model.head_memory import head_of
from graphtrain.cost_model.sizes import DeviceSizes
from graphtrain.cost_model.weights import ShardedWeight, shard_weights
from graphtrain.models.chunk_size import loss_chunk
from graphtrain.models.flops import Part, is_gated
from graphtrain.models.head_gradient_support import reduces_head_first
from graphtrain.models.mlp_block_count import mlp_block_count
from lowering.hlo.collectives import Collective

SecondsByAxes = Mapping[str, float | None]
# Of a training step: the products of a matrix in the forward pass, again, and of both gradients.
# MLPs have blocks only where the layer is computed again.
_PRODUCTS_OF_MLP_WEIGHT, _PRODUCTS_OF_HEAD = 4, 3


def exposed_reductions(
    program: ResolvedProgram,
    compute: Mapping[Part, float],
    seconds_of: Callable[[Iterable[Collective]], SecondsByAxes],
    weights: Sequence[ShardedWeight] | None = None,
) -> dict[str, float]:
    """Return the seconds of a step in which a device only reduces gradients, by mesh axes.

    Args:
        program: The program.
        compute: Seconds of products by part of the model.
        seconds_of: Returns the seconds of collectives by mesh axes; None where they are unknown.
        weights: Result of shard_weights, if the caller has it.
    """
    blocks, is_head_first = mlp_block_count(program), _reduces_head_first(program)
    if blocks == 1 and not is_head_first:
        return {}
    weights = shard_weights(program) if weights is None else weights
    exposed: dict[str, float] = {}
    if blocks > 1:
        in_mlp = [one for one in weights if one.in_layers and "/mlp/" in one.path]
        hidden = (2 / 3 if is_gated(program.model) else 1 / 2) / _PRODUCTS_OF_MLP_WEIGHT
        beside = hidden * compute["MLP"]
        if program.target.platform == "tpu":
            beside = 0.0  # a block of the loop begins when the one before is reduced
        _add(exposed, seconds_of(_reductions(program, in_mlp)), blocks, beside)
    if is_head_first:
        # A tied embedding as the head alone: the gradient of its lookup is reduced later.
        head = _as_head(head_of(weights))
        beside = compute["LM head"] / _PRODUCTS_OF_HEAD
        sent = seconds_of(_reductions(program, [head]))
        _add(exposed, sent, DeviceSizes.of(program).head_blocks, beside)
    return exposed


def _reduces_head_first(program: ResolvedProgram) -> bool:
    """Return whether the gradient of the head is reduced first; without chunks, no tied one is."""
    if not reduces_head_first(program):
        return False
    in_parts = loss_chunk(program) is not None or program.model.mtp_loss_weight is not None
    return in_parts or not program.model.tie_word_embeddings


def _as_head(weight: ShardedWeight) -> ShardedWeight:
    return replace(weight, path="head")


def _reductions(program: ResolvedProgram, weights: Iterable[ShardedWeight]) -> list[Collective]:
    """Return the collectives that reduce the gradients of weights in each backward pass."""
    return [
        one
        for weight in weights
        if not weight.frozen
        for one in gradient_collectives(program, weight)
        if one.devices > 1 and one.bytes and one.count
        if not one.exposed and not one.beside_tick  # once a step, of a pipeline
    ]


def _add(exposed: dict[str, float], sent: SecondsByAxes, blocks: int, beside: float) -> None:
    """Add what is exposed of the reductions of blocks.

    Args:
        exposed: Seconds by mesh axes, to which those of these reductions are added.
        sent: Seconds of the reductions of all blocks, by mesh axes.
        blocks: Number of blocks.
        beside: Seconds of the products beside which all blocks but the last are reduced, of all.
    """
    total = sum(seconds or 0.0 for seconds in sent.values())
    waiting = (1 - 1 / blocks) * max(0.0, total - beside) + total / blocks
    for axes, seconds in sent.items():
        if seconds:
            exposed[axes] = exposed.get(axes, 0.0) + waiting * seconds / total
