"""constrain(x, "batch", "seq", "embed"): the only sharding function that models call."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from lowering.tracing.context import set_context_variable
from lowering.tracing.source_lines import current_line
from lowering.trees import Tree, flatten, unflatten
from sharding_rules.arrays import ArraySpec, Role
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import ArrayLayout, make_layout
from sharding_rules.rules import Rules


@dataclass(frozen=True)
class Annotation:
    """Axes, shape and resulting split of one call of constrain()."""

    axes: tuple[str | None, ...]
    shape: tuple[int, ...]
    split: tuple[tuple[str, ...], ...]
    source: str  # line of the model's code, as in "graphtrain/models/mlp.py:45"


@dataclass(frozen=True)
class Placement:
    """Mesh and sharding rules that a graph is traced for, and the annotations made so far."""

    mesh: Mesh
    rules: Rules
    manual: tuple[str, ...] = ()  # mesh axes that are manual (shard_map) in the code being traced
    unrestricted_rules: Rules | None = (
        None  # the rules including the manual mesh axes; None outside shard_map
    )
    annotations: dict[Annotation, None] = field(default_factory=dict)  # ordered set

    @property
    def shape(self) -> MeshShape:
        return MeshShape(dict(self.mesh.shape))

    @property
    def current_mesh(self) -> Mesh | AbstractMesh:
        """Mesh to use in shardings: inside shard_map, the abstract mesh with its manual axes."""
        return jax.sharding.get_abstract_mesh() if self.manual else self.mesh


Axes = tuple[str | None, ...]

MEMORY_KINDS = {"device": "device", "host": "pinned_host"}  # ArraySpec.memory to JAX memory kind

_placement: ContextVar[Placement | None] = ContextVar("placement", default=None)


@contextmanager
def use_placement(mesh: Mesh, rules: Rules) -> Iterator[Placement]:
    """Apply these rules on this mesh in constrain() calls traced inside the block."""
    fresh = Placement(mesh, rules)
    with set_context_variable(_placement, fresh):
        yield fresh


@contextmanager
def manual_axes(mesh_axes: Iterable[str], inside: Placement | None = None) -> Iterator[None]:
    """Remove manual mesh axes from the rules; for code inside a shard_map over these axes.

    Args:
        mesh_axes: the axes that the shard_map makes manual.
        inside: the enclosing placement, if it is not the current one.
    """
    placement = inside or _placement.get()
    assert placement is not None, "manual_axes outside use_placement"
    manual = (*placement.manual, *mesh_axes)
    inner = replace(
        placement,
        rules=placement.rules.without_mesh_axes(mesh_axes),
        manual=manual,
        unrestricted_rules=placement.unrestricted_rules or placement.rules,
    )
    with set_context_variable(_placement, inner):
        yield


@contextmanager
def unsplit(*axes: str) -> Iterator[None]:
    """Leave activations whole along array axes, in the code traced inside; as a batch of one is."""
    current = _placement.get()
    if current is None:
        yield
        return
    split = current.rules.activations.items()
    activations = {axis: names for axis, names in split if axis not in axes}
    rules = replace(current.rules, activations=activations)
    with set_context_variable(_placement, replace(current, rules=rules)):
        yield


def placement() -> Placement | None:
    """Return the current Placement; None outside `placed`."""
    return _placement.get()


def in_shard_map() -> bool:
    """Return whether the code being traced is inside a shard_map."""
    current = _placement.get()
    return current is not None and bool(current.manual)


def mesh_axes_of(axis: str) -> tuple[str, ...]:
    """Return the mesh axes of more than one device that split an array axis of activations."""
    current = _placement.get()
    if current is None:
        return ()
    names = current.rules.activations.get(axis, ())
    return tuple(name for name in names if current.shape.axes.get(name, 1) > 1)


def manual_axes_of(axis: str) -> tuple[str, ...]:
    """Return the mesh axes that split an array axis of activations and are manual here."""
    current = _placement.get()
    if current is None or current.unrestricted_rules is None:
        return ()
    names = current.unrestricted_rules.activations.get(axis, ())
    return tuple(name for name in names if name in current.manual)


def draw_shard(
    draw_unsharded: Callable[[tuple[int, ...]], jax.Array], shape: tuple[int, ...], *axes: str
) -> jax.Array:
    """Draw this device's shard of an array of random numbers, independent of the mesh.

    Args:
        draw_unsharded: Draws an unsharded array of a given shape. The compiler computes only the
            shard.
        shape: Shape of the shard.
        axes: Array axes of its dimensions.
    """
    current = _placement.get()
    if current is None or current.unrestricted_rules is None:
        return draw_unsharded(shape)
    table = current.unrestricted_rules.activations
    split = [[name for name in table.get(axis, ()) if name in current.manual] for axis in axes]
    sizes = [current.shape.size(tuple(names)) for names in split]
    starts = [
        jax.lax.axis_index(tuple(names)) * size if names else 0
        for names, size in zip(split, shape, strict=True)
    ]
    unsharded = draw_unsharded(
        tuple(size * parts for size, parts in zip(shape, sizes, strict=True))
    )
    return jax.lax.dynamic_slice(unsharded, starts, shape)


def shards_of(axis: str) -> int:
    """Return the number of shards into which the rules split an array axis of activations."""
    current = _placement.get()
    return 1 if current is None else current.shape.size(mesh_axes_of(axis))


def on_each_device(
    function: Callable[..., Any],
    inputs: Sequence[PartitionSpec | None],
    output: PartitionSpec | tuple[PartitionSpec, ...],
) -> Callable[..., Any]:
    """Return a function that each device calls with its shards; the same one without a mesh.

    Args:
        function: Function of the shards of a device.
        inputs: How its arguments are split over the mesh; None for one that is None.
        output: How its result is, or each of its results.
    """
    context = placement()
    if context is None:
        return function
    return jax.shard_map(
        function,
        mesh=context.current_mesh,
        in_specs=tuple(inputs),
        out_specs=output,
        axis_names=set(context.shape.axes) - set(context.manual),
        check_vma=False,
    )


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrain the sharding of an activation, by the rules for the axis name of each dimension.

    Outside `placed`, return x unchanged, so that a model also runs without a mesh.

    Args:
        x: An activation.
        axes: Array axis of each dimension; None for a dimension that is never split.

    Raises:
        ShardingError: an unknown axis, or a size that its mesh axes do not divide.
    """
    spec = ArraySpec(x.shape, axes, str(x.dtype), "activation")
    return _constrain(f"activation {axes}", x, spec, _placement.get())


def reshard(x: jax.Array, axes: Axes, gradient_axes: Axes) -> jax.Array:
    """Constrain `x` by `axes`, and its gradient by `gradient_axes`.

    The gradient of constrain() has the sharding of x. Where x is gathered, this would all-reduce
    complete gradients and then discard most of each; with a sharded gradient it is a
    reduce-scatter.
    """
    current = _placement.get()  # the gradient may be traced after the block that placed x
    if current is None:
        return x

    @jax.custom_vjp
    def constrained(x: jax.Array) -> jax.Array:
        return _constrain_activation(x, axes, current)

    def forward(x: jax.Array) -> tuple[jax.Array, None]:
        return constrained(x), None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        return (_constrain_activation(gradient, gradient_axes, current),)

    constrained.defvjp(forward, backward)
    return constrained(x)


def _constrain_activation(x: jax.Array, axes: Axes, current: Placement) -> jax.Array:
    spec = ArraySpec(x.shape, axes, str(x.dtype), "activation")
    return _constrain(f"activation {axes}", x, spec, current)


def constrain_tree(tree: Tree, specs: Tree, role: Role) -> Tree:
    """Constrain the sharding of a tree like the parameters, by the rules for another role.

    With role "optimizer", for example, gradients have the sharding of the optimizer state.
    """
    arrays, current = flatten(tree), _placement.get()
    return unflatten(
        {
            path: _constrain(f"{role}/{path}", arrays[path], replace(spec, role=role), current)
            for path, spec in flatten(specs).items()
        }
    )


def _constrain(path: str, x: jax.Array, spec: ArraySpec, current: Placement | None) -> jax.Array:
    if current is None:
        return x
    placed_as = make_layout(path, spec, current.rules, current.shape)
    if spec.role == "activation":
        annotation = Annotation(spec.axes, spec.shape, placed_as.split, current_line())
        current.annotations.setdefault(annotation)
    return jax.lax.with_sharding_constraint(x, sharding(placed_as, current.current_mesh))


def sharding(array: ArrayLayout, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the NamedSharding of a Layout."""
    split = PartitionSpec(*(names or None for names in array.split))
    return NamedSharding(mesh, split, memory_kind=MEMORY_KINDS[array.spec.memory])


def to_device_memory(tree: Tree, specs: Tree) -> Tree:
    """Copy arrays that are stored in host memory to device memory; return the complete tree."""
    current = _placement.get()
    arrays = flatten(tree)
    if current is None:
        return tree
    return unflatten(
        {path: _fetch(path, arrays[path], spec, current) for path, spec in flatten(specs).items()}
    )


def _fetch(path: str, x: jax.Array, spec: ArraySpec, current: Placement) -> jax.Array:
    if spec.memory == "device":
        return x
    device_layout = make_layout(path, replace(spec, memory="device"), current.rules, current.shape)
    return jax.device_put(x, sharding(device_layout, current.current_mesh))
