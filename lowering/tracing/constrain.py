"""constrain(x, "batch", "seq", "embed"): the one sharding call models make."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from lowering.tracing.context import scoped
from lowering.tracing.source_lines import current_line
from lowering.trees import Tree, flatten, unflatten
from sharding_rules.arrays import ArraySpec, Role
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import Layout, layout
from sharding_rules.rules import Rules


@dataclass(frozen=True)
class Annotation:
    """What one call of constrain() said."""

    axes: tuple[str | None, ...]
    shape: tuple[int, ...]
    split: tuple[tuple[str, ...], ...]
    source: str  # line of the model's code, as in "graphtrain/models/mlp.py:45"


@dataclass(frozen=True)
class Placement:
    """The mesh and the rules a graph is traced for, and what constrain() has been told so far."""

    mesh: Mesh
    rules: Rules
    manual: tuple[str, ...] = ()  # mesh axes that the code being traced splits by hand
    by_hand: Rules | None = None  # the rules, with what they split over those axes too
    annotations: dict[Annotation, None] = field(default_factory=dict)  # in order, each once

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
def placed(mesh: Mesh, rules: Rules) -> Iterator[Placement]:
    """While tracing inside, constrain() follows these rules on this mesh."""
    fresh = Placement(mesh, rules)
    with scoped(_placement, fresh):
        yield fresh


@contextmanager
def by_hand(mesh_axes: Iterable[str], inside: Placement | None = None) -> Iterator[None]:
    """Inside a shard_map over these mesh axes: the rules split nothing over them any more.

    Args:
        inside: the placement around it, if not the current one.
    """
    placement = inside or _placement.get()
    assert placement is not None, "by_hand outside placed"
    manual = (*placement.manual, *mesh_axes)
    inner = replace(
        placement,
        rules=placement.rules.without(mesh_axes),
        manual=manual,
        by_hand=placement.by_hand or placement.rules,
    )
    with scoped(_placement, inner):
        yield


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


def draw(
    whole: Callable[[tuple[int, ...]], jax.Array], shape: tuple[int, ...], *axes: str
) -> jax.Array:
    """The part that a device holds of random numbers: those of one device, however the mesh splits.

    Args:
        whole: Draws an array of a shape; the compiler computes only the part that is used.
        shape: Of the part.
        axes: What its dimensions mean.
    """
    found = _placement.get()
    if found is None or found.by_hand is None:
        return whole(shape)
    table = found.by_hand.activations
    split = [[name for name in table.get(axis, ()) if name in found.manual] for axis in axes]
    sizes = [found.shape.size(tuple(names)) for names in split]
    starts = [
        jax.lax.axis_index(tuple(names)) * size if names else 0
        for names, size in zip(split, shape, strict=True)
    ]
    drawn = whole(tuple(size * parts for size, parts in zip(shape, sizes, strict=True)))
    return jax.lax.dynamic_slice(drawn, starts, shape)


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
    return _constrain(f"activation {axes}", x, spec, _placement.get())


def reshard(x: jax.Array, there: Axes, back: Axes) -> jax.Array:
    """constrain(x, *there), with the gradient placed by other axes on its way back.

    The gradient of constrain is placed as x is. Where x is gathered, that would sum whole gradients
    on every device and then throw most away; placed in pieces, they are reduced and scattered.
    """
    found = _placement.get()  # the gradient may be traced after the block that placed x
    if found is None:
        return x

    @jax.custom_vjp
    def place(x: jax.Array) -> jax.Array:
        return _place(x, there, found)

    def forward(x: jax.Array) -> tuple[jax.Array, None]:
        return place(x), None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        return (_place(gradient, back, found),)

    place.defvjp(forward, backward)
    return place(x)


def _place(x: jax.Array, axes: Axes, found: Placement) -> jax.Array:
    spec = ArraySpec(x.shape, axes, str(x.dtype), "activation")
    return _constrain(f"activation {axes}", x, spec, found)


def constrain_tree(tree: Tree, specs: Tree, role: Role) -> Tree:
    """Place the arrays of a tree, which mirrors the parameters, as their specs would be in a role.

    With role "optimizer", say, gradients come to rest in the pieces that the optimizer updates.
    """
    arrays, found = flatten(tree), _placement.get()
    return unflatten(
        {
            path: _constrain(f"{role}/{path}", arrays[path], replace(spec, role=role), found)
            for path, spec in flatten(specs).items()
        }
    )


def _constrain(path: str, x: jax.Array, spec: ArraySpec, found: Placement | None) -> jax.Array:
    if found is None:
        return x
    placed_as = layout(path, spec, found.rules, found.shape)
    if spec.role == "activation":
        said = Annotation(spec.axes, spec.shape, placed_as.split, current_line())
        found.annotations.setdefault(said)
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
