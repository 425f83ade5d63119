"""Graph that continues all slots by given tokens, and returns log-probabilities of others.

It is for evaluation, which scores many texts: each row reads its tokens into its slot, and asks for
targets, each of which is a token that may follow one of them. Several may follow the same one, as
the letters of a multiple-choice question do. The LM head is computed for the tokens that targets
follow alone, a block at a time, as long as any row has targets left.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.graphs.sampling import likeliest
from graphtrain.graphs.served_model import (
    continued_rows,
    decode_step,
    read_axis,
    scalar,
    state_specs,
    weight_specs,
)
from lowering.graph import Graph
from lowering.tracing.control_flow import repeat_while
from lowering.trees import Tree
from sharding_rules.arrays import ArraySpec

_BLOCK = 8  # targets of each row whose logits are computed at once


def row_scores_graph(program: ResolvedProgram, size: int) -> Graph:
    """Build the graph `score_rows_N`.

    Its inputs are, for each slot, `tokens` (slots, N) from the position `offset` on, and up to N
    targets: the `targets` (slots, N) and the indices in `tokens` that they follow, `after`.
    `count` is the largest number of targets of a slot. What a slot that is not wanted holds from
    its offset on is overwritten.
    """
    slots = program.settings.serve.slots

    def score_rows(
        weights: Tree,
        state: Tree,
        tokens: jax.Array,
        offset: jax.Array,
        after: jax.Array,
        targets: jax.Array,
        count: jax.Array,
    ) -> Tree:
        scores, kv_cache = decode_step(
            program,
            weights,
            state["kv_cache"],
            tokens,
            continued_rows(program, offset),
            read=partial(target_scores, after=after, targets=targets, count=count),
        )
        return {"state": state | {"kv_cache": kv_cache}, "scores": scores}

    by_token = ArraySpec((slots, size), ("batch", None), "int32", "activation")
    inputs = {
        "weights": weight_specs(program),
        "state": state_specs(program),
        "tokens": by_token,
        "offset": ArraySpec((slots,), ("batch",), "int32", "activation"),
        "after": by_token,
        "targets": by_token,
        "count": scalar("int32"),
    }
    outputs = {"state": state_specs(program), "scores": score_specs(program, slots, size)}
    return Graph(f"score_rows_{size}", score_rows, inputs, outputs, donated=("state",))


def score_specs(program: ResolvedProgram, rows: int, size: int) -> Tree:
    """Return the ArraySpecs of what `target_scores` returns, which every process reads."""
    axis = None if rows == 1 else read_axis(program)
    return {
        name: ArraySpec((rows, size), (axis, None), dtype, "activation")
        for name, dtype in (("log_prob", "float32"), ("likeliest", "int32"))
    }


def target_scores(
    logits_at: Callable[[jax.Array], jax.Array],
    after: jax.Array,
    targets: jax.Array,
    count: jax.Array,
    block: int = _BLOCK,
) -> Tree:
    """Return the log-probabilities of targets, and the most likely token in place of each.

    Args:
        logits_at: Returns the logits at indices of tokens (rows, indices).
        after: Index of the token that each target follows (rows, targets).
        targets: Tokens (rows, targets).
        count: Number of targets of the row that has most.
        block: Number of targets of each row whose logits are computed at once.
    """
    rows, size = targets.shape
    blocks = -(-size // block)
    padding = ((0, 0), (0, blocks * block - size))
    after, targets = jnp.pad(after, padding), jnp.pad(targets, padding)
    shape = rows, blocks * block
    scores = {"log_prob": jnp.zeros(shape), "likeliest": jnp.zeros(shape, jnp.int32)}

    def is_unfinished(carry: tuple[jax.Array, Tree]) -> jax.Array:
        return carry[0] < count

    def score_block(index: jax.Array, carry: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
        begin = index * block
        read = partial(jax.lax.dynamic_slice_in_dim, start_index=begin, slice_size=block, axis=1)
        logits, wanted = logits_at(read(after)), read(targets)
        given = jnp.take_along_axis(logits, wanted[..., None], 2)[..., 0]
        found = {
            "log_prob": given - jax.nn.logsumexp(logits, -1),
            "likeliest": likeliest(logits.reshape(rows * block, -1)).reshape(rows, block),
        }
        written = {
            name: jax.lax.dynamic_update_slice_in_dim(array, found[name], begin, 1)
            for name, array in carry[1].items()
        }
        return begin + block, written

    _, scores = repeat_while(is_unfinished, score_block, (jnp.int32(0), scores), blocks)
    return {name: array[:, :size] for name, array in scores.items()}
