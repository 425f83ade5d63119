"""Layouts of weights in memory, so that XLA transposes no stack of all layers' weights.

XLA:GPU all-gathers an array along its slowest dimension. If another dimension is split, such as
embed of a matrix (mlp, embed), it transposes the array. Without a layout constraint in the loop it
transposes the stack of all layers before the loop, in float32: a second copy of a third of the
parameters for the duration of the step. With the constraint, it transposes one layer at a time,
fused with the cast.

XLA:TPU gathers shards that are narrower than one of its tiles by summing arrays that are zero
elsewhere, and transposes the stacks of such weights before the loop: f32[32,11008,64], stored with
11,008 elements in a row, becomes one with rows of 64, which are padded to 128.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec

from lowering.machine.target import TPU_LANES
from lowering.tracing.constrain import placement
from lowering.tracing.current_target import traced_target
from lowering.tracing.tpu_hints import on_tpu
from sharding_rules.arrays import ArraySpec
from sharding_rules.plan import make_layout

Split = Sequence[tuple[str, ...]]  # the mesh axes that split each dimension


def keep_stored_layout(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """Constrain a parameter to the layout in which it is stored, where XLA would transpose a stack.

    On GPUs that is row-major layout, of parameters with a dimension other than 0 that is gathered.
    On TPUs it is that without padding, of those with shards narrower than TPU_LANES. Elsewhere, and
    inside a shard_map (data parallelism or a pipeline with manual axes), return x unchanged.

    Args:
        x: A parameter.
        axes: Array axis of each dimension.
    """
    current, target = placement(), traced_target()
    if current is None or current.manual or target is None:
        return x
    split = make_layout("parameter", ArraySpec(x.shape, axes), current.rules, current.shape).split
    order = None
    if target.is_gpu and _gathers_columns(split, axes):
        order = tuple(range(x.ndim))
    elif on_tpu():
        parts = [current.shape.size(names) for names in split]
        shard = [size // count for size, count in zip(x.shape, parts, strict=True)]
        order = _order_of_narrow(shard, split)
    if order is None:
        return x

    @jax.custom_vjp
    def kept(x: jax.Array) -> jax.Array:
        return _in_order(x, split, current.mesh, order)

    kept.defvjp(lambda x: (kept(x), None), lambda _, gradient: (gradient,))
    return kept(x)


def in_row_major(x: jax.Array, path: str, spec: ArraySpec) -> jax.Array:
    """Constrain a gathered parameter to row-major layout on GPU; elsewhere, return it unchanged.

    Args:
        x: A parameter, sharded as it is stored.
        path: Path of the parameter.
        spec: ArraySpec of the parameter.
    """
    current, target = placement(), traced_target()
    if current is None or target is None or not target.is_gpu:
        return x
    layout = make_layout(f"parameter/{path}", spec, current.rules, current.shape)
    return _in_order(x, layout.split, current.mesh, tuple(range(x.ndim)))


def _gathers_columns(split: Split, axes: tuple[str | None, ...]) -> bool:
    """Return whether a parameter is gathered along a dimension other than 0."""
    current = placement()
    assert current is not None
    activation_axes = {
        name for axis in axes if axis for name in current.rules.activations.get(axis, ())
    }
    return any(set(names) - activation_axes for names in split[1:])


def _order_of_narrow(shard: Sequence[int], split: Split) -> tuple[int, ...] | None:
    """Return how a TPU stores a narrow shard, slowest dimension first; None for a wide one.

    XLA's default layout has the last dimension that fills rows of TPU_LANES as the fastest.
    """
    if len(shard) < 2:
        return None
    if not any(names and size < TPU_LANES for size, names in zip(shard, split, strict=True)):
        return None
    full = [dimension for dimension, size in enumerate(shard) if size % TPU_LANES == 0]
    fastest = full[-1] if full else len(shard) - 1
    return (*(each for each in range(len(shard)) if each != fastest), fastest)


def _in_order(x: jax.Array, split: Split, mesh: Mesh, order: tuple[int, ...]) -> jax.Array:
    """Constrain the layout in a shard_map: the partitioner gathers the constraint's operand."""
    spec = PartitionSpec(*(names or None for names in split))
    layout = Layout(order)
    return jax.shard_map(
        lambda local: with_layout_constraint(local, layout),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )(x)
