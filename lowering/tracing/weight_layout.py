"""as_stored(x): weights of a layer enter the loop over layers as they lie in memory.

XLA for GPUs gathers an array along its slowest dimension. Where another one is split, as embed of a
matrix (mlp, embed), it turns the array round, and since nothing in the loop says otherwise it turns
the whole stack, before the loop and in float32: a second copy of a third of the parameters, held
for the step. Told how a layer lies, it turns that layer's, as it rounds it.
"""

from __future__ import annotations

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from lowering.tracing.constrain import placement
from lowering.tracing.current_target import traced_target
from sharding_rules.arrays import ArraySpec
from sharding_rules.plan import layout


def as_stored(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """The same values, in the order of its dimensions where a GPU's program would turn them round.

    Not inside a shard_map, where copies of a model or stages of a pipeline work by hand.

    Args:
        x: A parameter.
        axes: What its dimensions mean.
    """
    found, target = placement(), traced_target()
    if found is None or found.manual or target is None or not target.is_gpu:
        return x
    split = layout("parameter", ArraySpec(x.shape, axes), found.rules, found.shape).split
    used = {name for axis in axes if axis for name in found.rules.activations.get(axis, ())}
    if not any(set(names) - used for names in split[1:]):
        return x  # gathered along the slowest, or not at all
    rows = Layout(tuple(range(x.ndim)))
    spec = PartitionSpec(*(names or None for names in split))

    @jax.custom_vjp
    def in_rows(x: jax.Array) -> jax.Array:
        # Each device by itself: the partitioner would gather what a layout is asked of.
        return jax.shard_map(
            lambda local: with_layout_constraint(local, rows),
            mesh=found.mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )(x)

    in_rows.defvjp(lambda x: (in_rows(x), None), lambda _, gradient: (gradient,))
    return in_rows(x)
