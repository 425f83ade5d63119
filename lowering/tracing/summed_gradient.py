"""SummedGradient: weights of stacked layers whose gradient is written straight to its final place.

The gradient of a scan's stacked input is a stack, too, which JAX fills from zeros. During gradient
accumulation it would exist beside the sums; and XLA begins with zeros that depend on nothing before
the forward pass, where they exist beside the logits. Here the stack enters the backward loop as the
cotangent of a carried array. Each layer adds its gradient to its row of earlier sums, or writes it
to zeros that begin with the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from lowering.tracing.constrain import constrain_tree
from sharding_rules.arrays import ArraySpec, Role


@dataclass(frozen=True)
class GradientStack:
    """The gradients of all layers of one array."""

    spec: ArraySpec  # of the stacked weights
    role: Role  # by whose rules they are sharded
    has_sums: bool  # whether there are earlier sums; without, the first gradient begins them

    def constrain(self, gradient: jax.Array) -> jax.Array:
        """Constrain the gradients of all layers, or that of one, to the sharding of the stack."""
        skipped = len(self.spec.shape) - gradient.ndim
        spec = replace(self.spec, shape=self.spec.shape[skipped:], axes=self.spec.axes[skipped:])
        return constrain_tree({"gradient": gradient}, {"gradient": spec}, self.role)["gradient"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weights", "sums", "is_real"],
    meta_fields=["gradients"],
)
class SummedGradient:
    """Stacked weights, and the sums of their gradients so far.

    The cotangent of `sums` is their new value: `sums` plus the gradient of `weights`, which is
    zero unless `is_real`. `weights` must not be differentiated themselves.
    """

    def __init__(
        self,
        weights: jax.Array,
        sums: jax.Array,
        is_real: jax.Array | None,  # None: it is
        gradients: GradientStack,
    ):
        self.weights, self.sums, self.is_real = weights, sums, is_real
        self.gradients = gradients


def scan_summing_gradients(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, layers: Any, *, unroll: int = 1
) -> tuple[Any, Any]:
    """Run jax.lax.scan over layers, some of whose leaves may be SummedGradient.

    The body sees the weights of these leaves as plain arrays.

    Args:
        body: Function of the carry and of one layer; returns both.
        carry: Initial carry; the objective must depend on the final one.
        layers: Tree of arrays with a leading layer axis.
        unroll: Layers in one iteration.
    """
    leaves, structure = jax.tree.flatten(layers, is_leaf=_is_summed)
    summed = {str(index): leaf for index, leaf in enumerate(leaves) if _is_summed(leaf)}
    if not summed:
        return jax.lax.scan(body, carry, layers, unroll=unroll)
    stacks = {index: leaf.gradients for index, leaf in summed.items()}
    sums = {index: leaf.sums for index, leaf in summed.items()}
    is_real = {index: leaf.is_real for index, leaf in summed.items()}
    arrays = [leaf.weights if _is_summed(leaf) else leaf for leaf in leaves]

    def one_layer(carries: Any, scanned: Any) -> tuple[Any, Any]:
        carry, sums = carries
        row, arrays = scanned
        placed: list[Any] = [*arrays]
        new_sums: dict[str, Any] = {}
        for index, stack in stacks.items():
            taken: Any = _row(stack, placed[int(index)], sums[index], row, is_real[index])
            placed[int(index)], new_sums[index] = taken
        carry, result = body(carry, jax.tree.unflatten(structure, placed))
        return (carry, new_sums), result

    rows = jnp.arange(next(iter(sums.values())).shape[0])
    (carry, ends), results = jax.lax.scan(one_layer, (carry, sums), (rows, arrays), unroll=unroll)
    return _begin_backward(tuple(stacks.items()), carry, ends, sums), results


def _is_summed(leaf: Any) -> bool:
    return isinstance(leaf, SummedGradient)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row(
    stack: GradientStack,
    weights: jax.Array,
    sums: jax.Array,
    row: jax.Array,
    is_real: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return a layer's weights; in the backward pass, put their gradient into a row of the sums."""
    return weights, sums


def _row_forward(
    stack: GradientStack,
    weights: jax.Array,
    sums: jax.Array,
    row: jax.Array,
    is_real: jax.Array | None,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]]:
    return (weights, sums), (row, is_real)


def _row_backward(
    stack: GradientStack,
    saved: tuple[jax.Array, jax.Array | None],
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[None, jax.Array, None, None]:
    (row, is_real), (gradient, sums) = saved, cotangents
    if is_real is not None:
        gradient = jnp.where(is_real, gradient, 0)
    gradient = stack.constrain(gradient)
    if stack.has_sums:
        # XLA would otherwise add unreduced gradients, to sums of their own, and reduce those last.
        gradient = jax.lax.optimization_barrier(gradient)
        gradient += jax.lax.dynamic_index_in_dim(sums, row, keepdims=False)
    return None, jax.lax.dynamic_update_index_in_dim(sums, gradient, row, 0), None, None


_row.defvjp(_row_forward, _row_backward)


Stacks = tuple[tuple[str, GradientStack], ...]  # by the name that their arrays have here


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _begin_backward(stacks: Stacks, carry: Any, ends: Any, sums: Any) -> Any:
    """Return the carry; in the backward pass, `sums` or zeros become the cotangents of `ends`."""
    return carry


def _begin_forward(stacks: Stacks, carry: Any, ends: Any, sums: Any) -> tuple[Any, Any]:
    return carry, {name: sums[name] for name, stack in stacks if stack.has_sums}


def _begin(stacks: Stacks, sums: Any, gradient: Any) -> tuple[Any, Any, None]:
    # A zero that depends on the carry's gradient, so that no stack of zeros exists before. One for
    # each stack: XLA would compute two equal stacks once, and copy it.
    zeros = {name: jnp.zeros((), stack.spec.dtype) for name, stack in stacks if name not in sums}
    gradient, zeros = jax.lax.optimization_barrier((gradient, zeros))
    begun = {
        name: stack.constrain(jnp.broadcast_to(zeros[name], stack.spec.shape))
        for name, stack in stacks
        if name in zeros
    }
    return gradient, sums | begun, None


_begin_backward.defvjp(_begin_forward, _begin)
