"""keep_row_major(x): keep the row-major layout of a layer's weights inside the loop over layers.

XLA:GPU all-gathers an array along its slowest dimension. If another dimension is split, such as
embed of a matrix (mlp, embed), it transposes the array. Without a layout constraint in the loop it
transposes the stack of all layers before the loop, in float32: a second copy of a third of the
parameters for the duration of the step. With the constraint, it transposes one layer at a time,
fused with the cast.
"""

from __future__ import annotations

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec

from lowering.tracing.constrain import placement
from lowering.tracing.current_target import traced_target
from sharding_rules.arrays import ArraySpec
from sharding_rules.plan import make_layout


def keep_row_major(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """Constrain a parameter to row-major layout on GPU if a dimension other than 0 is gathered.

    Elsewhere, and inside a shard_map (data parallelism or a pipeline with manual axes), return x
    unchanged.

    Args:
        x: A parameter.
        axes: Array axis of each dimension.
    """
    current, target = placement(), traced_target()
    if current is None or current.manual or target is None or not target.is_gpu:
        return x
    split = make_layout("parameter", ArraySpec(x.shape, axes), current.rules, current.shape).split
    activation_axes = {
        name for axis in axes if axis for name in current.rules.activations.get(axis, ())
    }
    if not any(set(names) - activation_axes for names in split[1:]):
        return x  # gathered along dimension 0 or not gathered

    @jax.custom_vjp
    def in_rows(x: jax.Array) -> jax.Array:
        return _in_rows(x, split, current.mesh)

    in_rows.defvjp(lambda x: (in_rows(x), None), lambda _, gradient: (gradient,))
    return in_rows(x)


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
    return _in_rows(x, layout.split, current.mesh)


def _in_rows(x: jax.Array, split: tuple[tuple[str, ...], ...], mesh: Mesh) -> jax.Array:
    """Constrain the layout in a shard_map: the partitioner gathers the constraint's operand."""
    spec = PartitionSpec(*(names or None for names in split))
    rows = Layout(tuple(range(x.ndim)))
    return jax.shard_map(
        lambda local: with_layout_constraint(local, rows),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )(x)
