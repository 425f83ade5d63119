"""constrain(x, "batch", "seq", "embed"): the one sharding call models make."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding_rules.arrays import ArraySpec
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import Layout, layout
from sharding_rules.rules import Rules


@dataclass(frozen=True)
class _Placement:
    mesh: Mesh
    rules: Rules


_placement: ContextVar[_Placement | None] = ContextVar("placement", default=None)


@contextmanager
def placed(mesh: Mesh, rules: Rules) -> Iterator[None]:
    """While tracing inside, constrain() follows these rules on this mesh."""
    token = _placement.set(_Placement(mesh, rules))
    try:
        yield
    finally:
        _placement.reset(token)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Say what each dimension of an activation means, so that the rules can split it.

    Outside `placed` it returns x as it is, so a model also runs alone.

    Raises:
        ShardingError: an axis outside the vocabulary, or a size its mesh axes do not divide.
    """
    spec = ArraySpec(x.shape, axes, str(x.dtype), "activation")
    placement = _placement.get()
    if placement is None:
        return x
    mesh_shape = MeshShape(dict(placement.mesh.shape))
    placed_as = layout(f"activation {axes}", spec, placement.rules, mesh_shape)
    return jax.lax.with_sharding_constraint(x, sharding(placed_as, placement.mesh))


def sharding(array: Layout, mesh: Mesh) -> NamedSharding:
    """JAX's word for a Layout."""
    return NamedSharding(mesh, PartitionSpec(*(names or None for names in array.split)))
