"""Graphs that continue many sequences, each in a slot of a KV cache.

- `serve_init` casts the weights, splits those of stacked layers, and makes an empty state;
- `prefill_N` processes up to N tokens of a prompt, and chooses the first new token;
- `first_prefill_N` does the same; it is loaded sooner, see `names.first_prefill_size`;
- `decode` generates the next tokens of all slots, `decode_one` those of one slot;
- `score_N` returns the log-probabilities of N given tokens;
- `score_rows_N` those of given tokens after up to N tokens of every slot, see `graphs.row_scores`;
- `score_packed_N` those in many texts that share a prefix, see `graphs.packed_scores`;
- `copy_prefix` copies the KV cache of a slot to another one, see `graphs.copy_prefix`;
- `decode_beams` processes one token of each beam of a beam search, see `graphs.beams`.

The state, {"kv_cache", "sequences"}, stays on the devices and is updated in place. A slot that is
not active is computed too: what it writes is at positions that its next prefill overwrites.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.graphs.beams import decode_beams_graph
from graphtrain.graphs.copy_prefix import copy_prefix_graph
from graphtrain.graphs.layers_in_loop import prefill_in_loop
from graphtrain.graphs.names import ADAPTER_RANKS, FIRST_PREFILL, NO_TOKEN
from graphtrain.graphs.open_model import open_language_model
from graphtrain.graphs.packed_scores import packed_scores_graph
from graphtrain.graphs.row_scores import row_scores_graph
from graphtrain.graphs.sampling import choice_specs, choose, given_choice
from graphtrain.graphs.served_adapters import adapter_input, ranks_input
from graphtrain.graphs.served_model import (
    cast_weights,
    continued_rows,
    decode_step,
    kv_cache_specs,
    read_axis,
    scalar,
    sequence_request_specs,
    state_specs,
    weight_specs,
)
from lowering.graph import Graph
from lowering.tracing.control_flow import repeat_while
from lowering.trees import Tree
from sharding_rules.arrays import ArraySpec


def serving_graph(program: ResolvedProgram, name: str) -> Graph | None:
    """Build the graph of this name in `names.graphs_for`; None if it is not one of them."""
    kind, _, size = name.rpartition("_")
    by_size = {
        "prefill": _prefill,
        FIRST_PREFILL: partial(_prefill, in_loop=True),
        "score": _score,
        "score_rows": row_scores_graph,
        "score_packed": packed_scores_graph,
    }
    if kind in by_size and size.isdigit():
        return by_size[kind](program, int(size))
    builders = {
        "serve_init": _serve_init,
        "decode": _decode,
        "decode_one": _decode_one,
        "copy_prefix": copy_prefix_graph,
        "decode_beams": decode_beams_graph,
    }
    return builders[name](program) if name in builders else None


def _serve_init(program: ResolvedProgram) -> Graph:
    def serve_init(parameters: Tree, adapters: Tree | None = None) -> Tree:
        state = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), outputs["state"])
        return {"weights": cast_weights(parameters, program, adapters), "state": state}

    inputs = {"parameters": open_language_model(program.model).specs(), **adapter_input(program)}
    outputs = {"weights": weight_specs(program), "state": state_specs(program)}
    return Graph("serve_init", serve_init, inputs, outputs, runs_once=True)


def _prefill(program: ResolvedProgram, size: int, in_loop: bool = False) -> Graph:
    context = program.batch.seq_len

    def prefill(
        weights: Tree,
        state: Tree,
        tokens: jax.Array,
        length: jax.Array,
        slot: jax.Array,
        offset: jax.Array,
        is_last: jax.Array,
        request: Tree,
    ) -> Tree:
        rows, position = continued_rows(program, offset[None], slot), offset + length
        sequence = {name: array[None] for name, array in request.items()}
        ranks = sequence.get(ADAPTER_RANKS)
        inputs = program, weights, state["kv_cache"], tokens, rows, length - 1
        if in_loop:
            logits, kv_cache = prefill_in_loop(*inputs)
        else:
            logits, kv_cache = decode_step(*inputs, adapter_ranks=ranks)
        sequence["generated"] = jnp.zeros((1, program.model.vocab), jnp.float32)
        sequence["position"] = position[None]
        choice = choose(logits[:, 0], sequence)
        sequence = _after(sequence, choice["token"], context)
        sequence["active"] *= is_last
        sequences = _write_slot(state["sequences"], sequence, slot)
        return {"state": {"kv_cache": kv_cache, "sequences": sequences}, "choice": choice}

    inputs = {
        "weights": weight_specs(program),
        "state": state_specs(program),
        "tokens": ArraySpec((1, size), (None, "seq"), "int32", "activation"),
        **dict.fromkeys(("length", "slot", "offset", "is_last"), scalar("int32")),
        "request": sequence_request_specs(program),
    }
    outputs = {
        "state": state_specs(program),
        "choice": choice_specs((1,), (None,), program.model.vocab),
    }
    name = f"{FIRST_PREFILL if in_loop else 'prefill'}_{size}"
    return Graph(name, prefill, inputs, outputs, donated=("state",))


def _after(sequence: Tree, token: jax.Array, context: int) -> Tree:
    """Return sequences after a new token, whose position is `position`."""
    is_stop = (sequence["stop"] == token[:, None]).any(-1)
    remaining = sequence["remaining"] - 1
    goes_on = ~is_stop & (remaining > 0) & (sequence["position"] < context)
    rows = jnp.arange(len(token))
    return {
        **sequence,
        "token": token,
        "remaining": remaining,
        "active": goes_on.astype(jnp.int32),
        "generated": sequence["generated"].at[rows, token].add(1),
    }


def _write_slot(sequences: Tree, sequence: Tree, slot: jax.Array) -> Tree:
    return {
        name: jax.lax.dynamic_update_slice_in_dim(array, sequence[name], slot, 0)
        for name, array in sequences.items()
    }


def _decode(program: ResolvedProgram) -> Graph:
    slots = program.settings.serve.slots

    def decode(weights: Tree, state: Tree, enabled: jax.Array) -> Tree:
        sequences = state["sequences"] | {"active": state["sequences"]["active"] * enabled}
        return _generate(program, weights, state["kv_cache"], sequences)

    inputs = {
        "weights": weight_specs(program),
        "state": state_specs(program),
        "enabled": ArraySpec((slots,), ("batch",), "int32", "activation"),
    }
    outputs = _decode_outputs(program, slots, read_axis(program))
    return Graph("decode", decode, inputs, outputs, donated=("state",), has_few_rows=True)


def _decode_one(program: ResolvedProgram) -> Graph:
    def decode_one(weights: Tree, state: Tree, slot: jax.Array) -> Tree:
        sequence = {
            name: jax.lax.dynamic_slice_in_dim(array, slot, 1)
            for name, array in state["sequences"].items()
        }
        outputs = _generate(program, weights, state["kv_cache"], sequence, slot)
        outputs["state"]["sequences"] = _write_slot(
            state["sequences"], outputs["state"]["sequences"], slot
        )
        return outputs

    inputs = {
        "weights": weight_specs(program),
        "state": state_specs(program),
        "slot": scalar("int32"),
    }
    outputs = _decode_outputs(program, 1, None)
    return Graph("decode_one", decode_one, inputs, outputs, donated=("state",), has_few_rows=True)


def _decode_outputs(program: ResolvedProgram, batch: int, axis: str | None) -> Tree:
    count = program.settings.serve.tokens_per_call
    return {
        "state": state_specs(program),
        "choices": choice_specs((count, batch), (None, axis), program.model.vocab),
        "active": ArraySpec((batch,), (axis,), "int32", "activation"),
    }


def _generate(
    program: ResolvedProgram,
    weights: Tree,
    kv_cache: Tree,
    sequences: Tree,
    slot: jax.Array | None = None,
) -> Tree:
    """Generate up to `tokens_per_call` tokens of each sequence, until none is active."""
    context, count = program.batch.seq_len, program.settings.serve.tokens_per_call
    batch = len(sequences["token"])
    choices = jax.tree.map(
        lambda spec: jnp.full(spec.shape, NO_TOKEN, spec.dtype),
        choice_specs((count, batch), (None, None), program.model.vocab),
    )

    def is_unfinished(carry: tuple[Tree, Tree, Tree]) -> jax.Array:
        _, sequences, _ = carry
        return sequences["active"].any()

    def step(index: jax.Array, carry: tuple[Tree, Tree, Tree]) -> tuple[Tree, Tree, Tree]:
        kv_cache, sequences, choices = carry
        rows = continued_rows(program, sequences["position"], slot)
        tokens, ranks = sequences["token"][:, None], sequences.get(ADAPTER_RANKS)
        logits, kv_cache = decode_step(
            program, weights, kv_cache, tokens, rows, adapter_ranks=ranks
        )
        continued = sequences | {"position": sequences["position"] + 1}
        choice = choose(logits[:, 0], continued)
        continued = _after(continued, choice["token"], context)
        active = sequences["active"] > 0
        return (
            kv_cache,
            _where(active, continued, sequences),
            {
                name: array.at[index].set(_select(active, choice[name], array[index]))
                for name, array in choices.items()
            },
        )

    carry = kv_cache, sequences, choices
    kv_cache, sequences, choices = repeat_while(is_unfinished, step, carry, count)
    return {
        "state": {"kv_cache": kv_cache, "sequences": sequences},
        "choices": choices,
        "active": sequences["active"],
    }


def _where(active: jax.Array, new: Tree, old: Tree) -> Tree:
    return {name: _select(active, new[name], array) for name, array in old.items()}


def _select(active: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(active.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def _score(program: ResolvedProgram, size: int) -> Graph:
    cache = kv_cache_specs(program, 1)
    cache = jax.tree.map(_whole_slots, cache)

    def score(
        weights: Tree,
        kv_cache: Tree,
        tokens: jax.Array,
        targets: jax.Array,
        offset: jax.Array,
        adapter_ranks: jax.Array | None = None,
    ) -> Tree:
        rows = continued_rows(program, offset[None], jnp.int32(0))
        ranks = None if adapter_ranks is None else adapter_ranks[None]
        logits, kv_cache = decode_step(
            program, weights, kv_cache, tokens, rows, adapter_ranks=ranks
        )
        return {"kv_cache": kv_cache, "choices": given_choice(logits[0], targets)}

    inputs = {
        "weights": weight_specs(program),
        "kv_cache": cache,
        "tokens": ArraySpec((1, size), (None, "seq"), "int32", "activation"),
        "targets": ArraySpec((size,), ("seq",), "int32", "activation"),
        "offset": scalar("int32"),
        **ranks_input(program),
    }
    outputs = {"kv_cache": cache, "choices": choice_specs((size,), ("seq",), program.model.vocab)}
    return Graph(f"score_{size}", score, inputs, outputs, donated=("kv_cache",))


def _whole_slots(spec: ArraySpec) -> ArraySpec:
    axes = tuple(None if axis == "batch" else axis for axis in spec.axes)
    return ArraySpec(spec.shape, axes, spec.dtype, spec.role)
