"""Losses of the microbatches of a stage, one after the other, with their gradients.

The loss ends the forward pass, so its gradients are computed with it: nothing is computed again in
the backward pass, and each microbatch adds to the gradients of the earlier ones.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from lowering.pipeline.part_gradients import add_gradients, zero_gradients
from lowering.pipeline.schedule import PartWeights, Pipeline, Scalars
from lowering.trees import Tree

_Scores = tuple[jax.Array, Scalars]


def score_block(
    pipeline: Pipeline, weights: PartWeights, results: jax.Array, block: Tree
) -> _Scores:
    """Return the objective and the metrics of a stage's microbatches, each summed, of shape (1,).

    Only the objective has a gradient, with respect to the trained weights, the results and what
    `beside` computes.

    Args:
        pipeline: The functions to compute.
        weights: Weights of `last`.
        results: Results of the last stage, (M / S, ...).
        block: Arrays of the microbatches, (M / S, ...).
    """
    in_place = pipeline.in_place.get("last", {})

    def forward(
        trained: Tree, frozen: Tree, inputs: Tree, arrays: Tree
    ) -> tuple[_Scores, tuple[Tree, Tree]]:
        def add(sums: Tree, item: tuple[Tree, Tree]) -> tuple[Tree, tuple[_Scores, Tree]]:
            inputs, arrays = item

            def last(trained: Tree, inputs: Tree) -> _Scores:
                x, beside = inputs
                return pipeline.last(PartWeights(trained, frozen), x, {**arrays, **beside})

            objective, back, metrics = add_gradients(last, in_place, trained, sums, inputs)
            sums, of_inputs = back(jnp.ones_like(objective))
            return sums, ((objective, metrics), of_inputs)

        sums, (each, of_inputs) = lax.scan(add, zero_gradients(trained), (inputs, arrays))
        return _total(each), (sums, of_inputs)

    @jax.custom_vjp
    def scores(trained: Tree, frozen: Tree, inputs: Tree, arrays: Tree) -> _Scores:
        x, beside = inputs
        items = x, {**arrays, **beside}
        each = lax.map(lambda item: pipeline.last(PartWeights(trained, frozen), *item), items)
        return _total(each)

    def backward(
        gradients: tuple[Tree, Tree], cotangents: _Scores
    ) -> tuple[Tree, None, Tree, None]:
        (factor,) = cotangents[0]
        of_weights, of_inputs = jax.tree.map(lambda x: (x * factor).astype(x.dtype), gradients)
        return of_weights, None, of_inputs, None

    scores.defvjp(forward, backward)
    # An array of a microbatch depends on weights only if `beside` computes it.
    names = [name for name, x in block.items() if jnp.issubdtype(x.dtype, jnp.inexact)]
    beside = {name: block[name] for name in names} if pipeline.beside else {}
    arrays = {name: x for name, x in block.items() if name not in beside}
    return scores(weights.trained, weights.frozen, (results, beside), arrays)


def _total(each: _Scores) -> _Scores:
    """Return the sums over microbatches, of shape (1,)."""
    return jax.tree.map(lambda scalars: scalars.sum(0, keepdims=True), each)
