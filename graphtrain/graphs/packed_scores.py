"""Graph that scores many texts in one row, all after the same prefix.

It is for evaluation, where thousands of questions follow the same examples: the prefix is in the KV
cache once, and the questions lie one after the other, so that next to nothing is padding. Answers
to one question are branches of it: the question is computed once. The KV cache is only read.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.serving_program import packed_rows
from graphtrain.graphs.row_scores import score_specs, target_scores
from graphtrain.graphs.served_model import (
    continued_rows,
    decode_step,
    scalar,
    state_specs,
    weight_specs,
)
from graphtrain.models.attention.kv_cache import PackedTokens
from lowering.graph import Graph
from lowering.trees import Tree
from sharding_rules.arrays import ArraySpec

_BLOCK = 32  # targets whose logits are computed at once, of all rows


def packed_scores_graph(program: ResolvedProgram, size: int) -> Graph:
    """Build the graph `score_packed_N`.

    Its inputs are `prefix`, the number of tokens that the texts share, and for each row `tokens`
    (rows, N), `position`, `text` and `branch` of each of them as in PackedTokens, and the
    targets of `score_rows_N`. The only row continues the prefix in slot 0; where devices share the
    slots, there is a row for each of them, which all hold the prefix.
    """
    rows = packed_rows(program)

    def score_packed(
        weights: Tree,
        kv_cache: Tree,
        tokens: jax.Array,
        position: jax.Array,
        text: jax.Array,
        branch: jax.Array,
        prefix: jax.Array,
        after: jax.Array,
        targets: jax.Array,
        count: jax.Array,
    ) -> Tree:
        read = partial(
            target_scores, after=after, targets=targets, count=count, block=max(1, _BLOCK // rows)
        )
        slot = jnp.int32(0) if rows == 1 else None
        packed = PackedTokens(position, text, branch)
        continued = continued_rows(program, jnp.full((rows,), prefix), slot, packed)
        scores, _ = decode_step(program, weights, kv_cache, tokens, continued, read=read)
        return {"scores": scores}

    axis = None if rows == 1 else "batch"
    by_token = ArraySpec((rows, size), (axis, None), "int32", "activation")
    inputs = {
        "weights": weight_specs(program),
        "kv_cache": state_specs(program)["kv_cache"],
        **dict.fromkeys(("tokens", "position", "text", "branch"), by_token),
        "prefix": scalar("int32"),
        **dict.fromkeys(("after", "targets"), by_token),
        "count": scalar("int32"),
    }
    outputs = {"scores": score_specs(program, rows, size)}
    return Graph(f"score_packed_{size}", score_packed, inputs, outputs)
