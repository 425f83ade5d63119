"""Gradients of a part of a pipeline, added to those of earlier passes.

Some parts add them in place: a second array of the newest gradients never exists. How a part does
it is up to its function: see lowering.tracing.summed_gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lowering.pipeline.ring import zero_unless
from lowering.tracing.summed_gradient import GradientStack, SummedGradient
from lowering.trees import Tree, flatten, unflatten
from sharding_rules.arrays import ArraySpec

InPlace = Mapping[str, ArraySpec]  # arrays to whose sums a part adds the gradients itself, by path


def add_gradients(
    function: Callable[..., Any],
    in_place: InPlace,
    trained: Tree,
    sums: Tree,
    *inputs: Any,
    is_real: jax.Array | None = None,
) -> tuple[Any, Callable[[Any], tuple[Any, ...]], Any]:
    """Return the result of a function, how it is differentiated, and its auxiliary result.

    Args:
        function: Function of the trained weights and of `inputs`, which returns a result to
            differentiate and an auxiliary one. Of the arrays in place it gets SummedGradient.
        in_place: Specs of arrays whose gradients `function` adds to their sums.
        trained: Weights.
        sums: Gradients of earlier passes, a tree like `trained`.
        inputs: Further arguments of the function.
        is_real: Whether the weights have gradients; in the bubble they have none.

    Returns:
        The result; a function of its cotangent that returns the new sums, and the gradients of
        the inputs; the auxiliary result.
    """
    has_weights = bool(jax.tree.leaves(trained))
    arrays, earlier = (flatten(tree) if has_weights else {} for tree in (trained, sums))
    stacks = {
        path: GradientStack(in_place[path], "optimizer", has_sums=True)
        for path in arrays
        if path in in_place
    }

    def of_leaves(leaves: dict[str, Any], *inputs: Any) -> tuple[Any, Any]:
        summed = {
            path: SummedGradient(arrays[path], leaves[path], is_real, stack)
            for path, stack in stacks.items()
        }
        return function(unflatten(leaves | summed) if has_weights else trained, *inputs)

    leaves = {path: earlier[path] if path in stacks else array for path, array in arrays.items()}
    result, back, auxiliary = jax.vjp(of_leaves, leaves, *inputs, has_aux=True)

    def backward(cotangent: Any) -> tuple[Any, ...]:
        newest, *of_inputs = back(cotangent)
        added = {
            path: gradient if path in stacks else earlier[path] + _real(is_real, gradient)
            for path, gradient in newest.items()
        }
        return (unflatten(added) if has_weights else trained), *of_inputs

    return result, backward, auxiliary


def _real(is_real: jax.Array | None, gradient: jax.Array) -> jax.Array:
    return gradient if is_real is None else zero_unless(is_real, gradient)


def zero_gradients(trained: Tree) -> Tree:
    """Return the sums before the first pass."""
    return jax.tree.map(jnp.zeros_like, trained)
