"""Prefill of the native decoder with its layers in a loop: a program that is loaded soonest."""

from __future__ import annotations

from functools import partial

import jax

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import is_imported
from graphtrain.graphs.open_model import open_language_model
from graphtrain.graphs.served_model import (
    CODES,
    SCALES,
    order_of_parameters,
    weight_in_order,
    with_rows,
)
from graphtrain.models.attention.kv_cache import CacheRows
from graphtrain.models.decode import decode_step_in_loop
from graphtrain.models.matmul import few_rows
from lowering.tracing.constrain import unsplit
from lowering.tracing.cpu_hints import materialize
from lowering.trees import Tree, flatten, unflatten


def prefill_in_loop(
    program: ResolvedProgram,
    weights: Tree,
    kv_cache: Tree,
    tokens: jax.Array,
    rows: CacheRows,
    last: jax.Array,
) -> tuple[jax.Array, Tree]:
    """Return what `decode_step` does for one slot, with the layers in a loop.

    The program must be one for which names.first_prefill_size() is a size.
    """
    assert not is_imported(program.model)
    select = partial(_select_layer, weights, program)
    parameters = with_rows(weights, program)
    with few_rows(), unsplit("batch", "dispatch_batch"):
        return decode_step_in_loop(program.model, parameters, select, kv_cache, tokens, rows, last)


def _select_layer(weights: Tree, program: ResolvedProgram, index: jax.Array) -> Tree:
    """Return the weights of the layer with an index, in the tree of parameters["layers"].

    They are selected as they are stored, so that XLA copies them, and transposes none.
    """
    specs, served = flatten(open_language_model(program.model).specs()), flatten(weights)
    stacked = {path: spec for path, spec in specs.items() if path.startswith("layers/")}
    layers = [
        {
            path + part: served[f"{path}/{row:03}{part}"]
            for path in stacked
            for part in ("", f"/{CODES}", f"/{SCALES}")
            if f"{path}/{row:03}{part}" in served
        }
        for row in range(program.model.layers)
    ]
    selected = materialize(jax.lax.switch(index, [partial(dict, layer) for layer in layers]))
    return unflatten(
        {
            path: weight_in_order(selected, path, order_of_parameters(spec, program)[1])
            for path, spec in stacked.items()
        }
    )["layers"]
