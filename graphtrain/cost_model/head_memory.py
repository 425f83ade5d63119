"""Memory of the LM head's gradient until it is reduced, and of embeddings, by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.sizes import DeviceSizes
from graphtrain.cost_model.weights import ShardedWeight
from graphtrain.models.head_gradient_support import reduces_head_first
from sharding_rules.mesh import MeshShape


def pending_head_gradient(
    program: ResolvedProgram, sizes: DeviceSizes, weights: Sequence[ShardedWeight]
) -> float:
    """Return the bytes that wait until the LM head's gradient is scattered.

    It is scattered before the layers' backward pass where reduces_head_first says so, and in the
    loop over microbatches with which GPipe and circular schedules end; else during that pass. Until
    then its unsharded sum waits if the loss is computed in chunks; otherwise, in GPU programs that
    gather the head, the bfloat16 gradient of the logits waits.
    """
    head = head_of(weights)
    in_own_loop = program.mesh.axes.get("stage", 1) > 1 and program.pipeline.schedule != "1f1b"
    if head.frozen or in_own_loop or reduces_head_first(program):
        return 0.0
    if sizes.in_chunks:
        return summed_head(weights, program.mesh) if set(head.optimizer) - set(head.in_use) else 0.0
    gathered = head.path == "head" and "fsdp" in head.stored
    if program.target.platform != "cuda" or not gathered:
        return 0.0
    return 2 * sizes.sequences * sizes.seq_in_block * sizes.vocab


def summed_head(weights: Sequence[ShardedWeight], mesh: MeshShape) -> float:
    """Return the bytes of the LM head's gradient that chunks sum: float32, unsharded over embed."""
    head = head_of(weights)
    return 0.0 if head.frozen else 4 * head.used_of_a_layer(mesh)


def cast_embedding(program: ResolvedProgram, weights: Sequence[ShardedWeight]) -> float:
    """Return the bytes of an embedding in the model's dtype that exists during a whole step.

    XLA for TPUs casts the table once, before the loop over microbatches.
    """
    if program.target.platform != "tpu" or program.batch.microbatches == 1:
        return 0.0
    if program.model.tie_word_embeddings or program.model.dtype == "float32":
        return 0.0
    table = next(weight for weight in weights if weight.path == "embedding/tokens")
    return 2 * table.elements("parameter", program.mesh)


def logits_of_one_chunk(
    sizes: DeviceSizes, weights: Sequence[ShardedWeight], mesh: MeshShape
) -> float:
    """Return the bytes of all logits' gradient and of what exists beside it, in one chunk.

    That is the gathered head with the float32 logits of a part, then two blocks of the head's
    gradient, in float32.
    """
    gathered = sizes.item_bytes * head_of(weights).used_of_a_layer(mesh)
    of_part = 4 * sizes.scored_positions * sizes.sequences * sizes.vocab
    of_blocks = 2 * summed_head(weights, mesh) / sizes.head_blocks
    logits = sizes.item_bytes * sizes.logit_positions * sizes.sequences * sizes.vocab
    return logits + max(gathered + of_part, of_blocks)


def head_of(weights: Sequence[ShardedWeight]) -> ShardedWeight:
    """Return the LM head's weights, which are the embedding's if tied.

    The trained ones, if DPO has those of the reference model too.
    """
    frozen_first = sorted(weights, key=lambda weight: not weight.frozen)
    by_path = {weight.path: weight for weight in frozen_first}
    return by_path.get("head") or by_path["embedding/tokens"]
