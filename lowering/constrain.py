"""constrain(x, "batch", "seq", "embed"): the one sharding call models make."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from lowering.trees import Tree, flatten, unflatten
from sharding_rules.arrays import ArraySpec, Role
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import Layout, layout
from sharding_rules.rules import Rules


@dataclass(frozen=True)
class Placement:
    """The mesh and the rules a graph is traced for."""

    mesh: Mesh
    rules: Rules
    manual: tuple[str, ...] = ()  # mesh axes that the code being traced splits by hand

    @property
    def shape(self) -> MeshShape:
        return MeshShape(dict(self.mesh.shape))

    @property
    def current_mesh(self) -> Mesh | AbstractMesh:
        """What shardings name: inside shard_map, the mesh that knows its axes are manual."""
        return jax.sharding.get_abstract_mesh() if self.manual else self.mesh


Axes = tuple[str | None, ...]

MEMORY_KINDS = {"device": "device", "host": "pinned_host"}  # JAX's words

_placement: ContextVar[Placement | None] = ContextVar("placement", default=None)


@contextmanager
def placed(mesh: Mesh, rules: Rules) -> Iterator[None]:
    """While tracing inside, constrain() follows these rules on this mesh."""
    token = _placement.set(Placement(mesh, rules))
    try:
        yield
    finally:
        _placement.reset(token)


@contextmanager
def by_hand(mesh_axes: Iterable[str]) -> Iterator[None]:
    """Inside a shard_map over these mesh axes: the rules split nothing over them any more."""
    placement = _placement.get()
    assert placement is not None, "by_hand outside placed"
    manual = (*placement.manual, *mesh_axes)
    token = _placement.set(
        replace(placement, rules=placement.rules.without(mesh_axes), manual=manual)
    )
    try:
        yield
    finally:
        _placement.reset(token)


def placement() -> Placement | None:
    """What `placed` was given; None while a model runs alone."""
    return _placement.get()


def by_hand_now() -> bool:
    """Whether the code being traced is inside a shard_map."""
    found = _placement.get()
    return found is not None and bool(found.manual)


def split_of(axis: str) -> tuple[str, ...]:
    """Mesh axes of more than one device that split an array axis of activations."""
    found = _placement.get()
    if found is None:
        return ()
    names = found.rules.activations.get(axis, ())
    return tuple(name for name in names if found.shape.axes.get(name, 1) > 1)


def size_of(axis: str) -> int:
    """Into how many pieces the rules split an array axis of activations."""
    found = _placement.get()
    return 1 if found is None else found.shape.size(split_of(axis))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Say what each dimension of an activation means, so that the rules can split it.

    Outside `placed` it returns x as it is, so a model also runs alone.

    Raises:
        ShardingError: an axis outside the vocabulary, or a size its mesh axes do not divide.
    """
    spec = ArraySpec(x.shape, axes, str(x.dtype), "activation")
    return _constrain(f"activation {axes}", x, spec)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def reshard(x: jax.Array, there: Axes, back: Axes) -> jax.Array:
    """constrain(x, *there), with the gradient placed by other axes on its way back.

    The gradient of constrain is placed as x is. Where x is gathered, that would sum whole gradients
    on every device and then throw most away; placed in pieces, they are reduced and scattered.
    """
    return constrain(x, *there)


def _reshard_forward(x: jax.Array, there: Axes, back: Axes) -> tuple[jax.Array, None]:
    return constrain(x, *there), None


def _reshard_backward(there: Axes, back: Axes, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (constrain(gradient, *back),)


reshard.defvjp(_reshard_forward, _reshard_backward)


def constrain_tree(tree: Tree, specs: Tree, role: Role) -> Tree:
    """Place the arrays of a tree, which mirrors the parameters, as their specs would be in a role.

    With role "optimizer", say, gradients come to rest in the pieces that the optimizer updates.
    """
    arrays = flatten(tree)
    return unflatten(
        {
            path: _constrain(f"{role}/{path}", arrays[path], replace(spec, role=role))
            for path, spec in flatten(specs).items()
        }
    )


def _constrain(path: str, x: jax.Array, spec: ArraySpec) -> jax.Array:
    found = _placement.get()
    if found is None:
        return x
    placed_as = layout(path, spec, found.rules, found.shape)
    return jax.lax.with_sharding_constraint(x, sharding(placed_as, found.current_mesh))


def sharding(array: Layout, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """JAX's word for a Layout."""
    split = PartitionSpec(*(names or None for names in array.split))
    return NamedSharding(mesh, split, memory_kind=MEMORY_KINDS[array.spec.memory])


def fetch(tree: Tree, specs: Tree) -> Tree:
    """The tree with what rests in the host's memory brought to the device's."""
    found = _placement.get()
    arrays = flatten(tree)
    if found is None:
        return tree
    return unflatten(
        {path: _fetch(path, arrays[path], spec, found) for path, spec in flatten(specs).items()}
    )


def _fetch(path: str, x: jax.Array, spec: ArraySpec, found: Placement) -> jax.Array:
    if spec.memory == "device":
        return x
    here = layout(path, replace(spec, memory="device"), found.rules, found.shape)
    return jax.device_put(x, sharding(here, found.current_mesh))
