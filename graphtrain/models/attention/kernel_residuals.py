"""Residuals of the attention kernel for TPUs, saved in no more bytes than they have.

TPUs pad the output's heads of 64 to 128 elements. The kernel writes the log-sum-exp of each row of
scores 128 times, and XLA would take one of them only where the backward pass reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.tree_util import Partial

from graphtrain.models.projection import PROJECTION
from lowering.tracing.tpu_hints import merge_heads, pads_heads


def name_residuals(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return the kernel with the name PROJECTION, by which remat saves arrays, on what it computes.

    Args:
        kernel: Function of queries, keys and values (batch, heads, seq, head_dim), and of segment
            ids or None. Of floating-point arrays it saves these inputs, its output and the
            log-sum-exp.
    """

    @jax.custom_vjp
    def attend(query: jax.Array, key: jax.Array, value: jax.Array, segments: Any) -> jax.Array:
        return kernel(query, key, value, segments)

    def forward(*arrays: Any) -> tuple[jax.Array, Partial]:
        *inputs, segments = arrays
        output, differentiate = jax.vjp(lambda *inputs: kernel(*inputs, segments), *inputs)
        leaves, structure = jax.tree.flatten(differentiate)
        shape = output.shape
        computed = [n for n, leaf in enumerate(leaves) if _is_computed(leaf, inputs)]

        def differentiate_restored(named: list[jax.Array], others: list[Any]) -> Any:
            all_leaves, arrays = list(others), [_split_heads(array, shape) for array in named]
            for n, array in zip(computed, arrays, strict=True):
                all_leaves[n] = array
            return jax.tree.unflatten(structure, all_leaves)

        # After a barrier, so that of the log-sum-exp one copy remains.
        merged = jax.lax.optimization_barrier([_merge_heads(leaves[n]) for n in computed])
        named = [checkpoint_name(array, PROJECTION) for array in merged]
        others = [None if n in computed else leaf for n, leaf in enumerate(leaves)]
        of_output = next(i for i, n in enumerate(computed) if leaves[n] is output)
        return _split_heads(named[of_output], shape), Partial(differentiate_restored, named, others)

    def backward(restore: Partial, gradient: jax.Array) -> tuple[Any, ...]:
        # XLA would otherwise convert and transpose saved arrays before their gradient is there,
        # beside the hidden values of the MLP.
        restore, gradient = jax.lax.optimization_barrier((restore, gradient))
        return (*restore()(gradient), None)

    attend.defvjp(forward, backward)
    return attend


def _is_computed(leaf: Any, inputs: list[Any]) -> bool:
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return is_float and not any(leaf is array for array in inputs)


def _merge_heads(x: jax.Array) -> jax.Array:
    """Return (batch, heads, seq, head_dim) as (batch, seq, heads x head_dim) if it was padded."""
    if x.ndim < 4 or not pads_heads(x):
        return x
    return merge_heads(x.swapaxes(1, 2))


def _split_heads(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return what _merge_heads has merged in the shape of the output; else x."""
    batch, heads, length, head_dim = shape
    if x.shape != (batch, length, heads * head_dim):
        return x
    return x.reshape(batch, length, heads, head_dim).swapaxes(1, 2)
