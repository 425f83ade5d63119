"""record("mlp/up", x, "batch", "seq", "mlp"): name an activation, so that a graph can return it.

Outside of `recording` nothing is traced for a name. Inside, the values of the names that are wanted
are collected while the function is traced, and the gradient with respect to an array becomes the
cotangent of its slot, an array of zeros that the caller differentiates by. Neither needs a callback
of the compiled program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lowering.tracing.constrain import constrain
from lowering.tracing.context import set_context_variable
from lowering.tracing.source_lines import current_line
from lowering.tracing.summed_gradient import scan_summing_gradients

Wanted = Callable[[str], bool]
MARK = "recorded:"  # begins the names of operations that mark an activation


@dataclass(frozen=True)
class RecordedArray:
    """Description of a named activation: of a loop over layers, all layers in one array."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: str
    source: str  # line that names it, as in "graphtrain/models/mlp.py:45"
    layers: int | None = None  # size of the first dimension, if it is one of layers
    loop: str = ""  # name of the loop over them, with which the array's name begins


@dataclass(frozen=True)
class Recorder:
    """Named activations of the function that is being traced."""

    is_wanted: Wanted
    slots: Mapping[str, jax.Array]
    marks: bool = False  # whether activations are marked in the traced program
    prefix: str = ""  # of the names of a loop's body in the model
    values: dict[str, jax.Array] = field(default_factory=dict)
    described: dict[str, RecordedArray] = field(default_factory=dict)  # in the order of execution


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def recording(
    is_wanted: Wanted = lambda name: False,
    slots: Mapping[str, jax.Array] | None = None,
    *,
    marks: bool = False,
    prefix: str = "",
) -> Iterator[Recorder]:
    """Collect the named activations of the code traced inside the block.

    Args:
        is_wanted: whether the value of a name is collected.
        slots: zeros in the shape of an activation, by its name, whose cotangents are the gradients
            with respect to the activations.
        marks: whether activations are marked in the traced program, for `recorded_lines`.
        prefix: of the names, where they are marked.
    """
    new = Recorder(is_wanted, slots or {}, marks, prefix)
    with set_context_variable(_recorder, new) as recorder:
        assert recorder is not None
        yield recorder


Recorded = Mapping[str, jax.Array]  # activations, or gradients with respect to them, by name


def call_recording(
    is_wanted: Wanted | None, slots: Recorded, function: Callable[..., Any], *inputs: Any
) -> tuple[Any, Recorded]:
    """Call a function; return its result and the values of its named activations.

    This is how they leave a loop or a shard_map, whose body calls it.

    Args:
        is_wanted: whether the value of a name is collected; None: nothing is recorded.
        slots: zeros by name, as of `recording`.
        function: the function.
        inputs: its inputs.
    """
    if is_wanted is None:
        return function(*inputs), {}
    with recording(is_wanted, slots) as recorder:
        result = function(*inputs)
    return result, recorder.values


def zero_slots(names: Collection[str], function: Callable[..., Any], *inputs: Any) -> Recorded:
    """Return zeros in the shapes of some named activations of a function, found by tracing it."""
    if not names:
        return {}
    with recording() as recorder:
        # A new function: JAX does not trace one again that it has traced for the same shapes.
        jax.eval_shape(lambda *inputs: function(*inputs), *inputs)
    found = {name: recorder.described[name] for name in names if name in recorder.described}
    return {
        name: constrain(jnp.zeros(one.shape, one.dtype), *one.axes) for name, one in found.items()
    }


def is_recording() -> bool:
    """Return whether the code that is traced is inside `recording`."""
    return _recorder.get() is not None


def without_recording() -> AbstractContextManager[Any]:
    """Return a context whose code records nothing, for a second pass through a model."""
    return set_context_variable(_recorder, None)


@contextmanager
def recording_later() -> Iterator[Callable[[], None]]:
    """Record nothing that the block computes before it calls the function that is yielded.

    For a part of a model that first computes, again, what another part records.
    """
    outer = _recorder.get()
    if outer is None:
        yield lambda: None
        return

    def begin() -> None:
        _recorder.set(outer)

    with recording():  # for a recorder that nobody reads
        yield begin


def record(name: str, x: jax.Array, *axes: str | None) -> jax.Array:
    """Name an activation; return it, or an equal array whose gradient is recorded.

    Not for code inside a custom_vjp or a shard_map, whose values cannot leave it by this way.

    Args:
        name: name within the loop body or the model, as in "attention/query".
        x: an activation.
        axes: array axis of each dimension; None for a dimension that is never split.
    """
    current = _recorder.get()
    if current is None:
        return x
    assert name not in current.described, f"{name} is recorded twice"
    current.described[name] = RecordedArray(x.shape, axes, str(x.dtype), current_line())
    if current.is_wanted(name):
        current.values[name] = x
    if current.marks:
        x = checkpoint_name(x, MARK + current.prefix + name)
    slot = current.slots.get(name)
    return x if slot is None else _with_gradient(x, slot)


@jax.custom_vjp
def _with_gradient(x: jax.Array, slot: jax.Array) -> jax.Array:
    return x


_with_gradient.defvjp(
    lambda x, slot: (x, None),
    lambda _, gradient: (gradient, gradient),
)


def scan_layers(
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    layers: Any,
    *,
    name: str = "layers",
    transform: Callable[[Any], Any] = lambda body: body,
    unroll: int = 1,
) -> tuple[Any, Any]:
    """Run jax.lax.scan with a body that may record activations: "NAME/..." with a layer axis.

    Args:
        body: function of the carry and of one layer; returns both.
        carry: initial carry.
        layers: tree of arrays with a leading layer axis.
        name: name of the loop.
        transform: transformation of the body, such as jax.checkpoint.
        unroll: layers in one iteration.
    """
    outer = _recorder.get()
    if outer is None:
        return scan_summing_gradients(transform(body), carry, layers, unroll=unroll)
    prefix = f"{name}/"
    slots = {
        path.removeprefix(prefix): slot
        for path, slot in outer.slots.items()
        if path.startswith(prefix)
    }
    described: dict[str, RecordedArray] = {}

    def recorded(carry: Any, layer: tuple[Any, Any]) -> tuple[Any, Any]:
        layer, layer_slots = layer
        inside = recording(
            lambda path: outer.is_wanted(prefix + path),
            layer_slots,
            marks=outer.marks,
            prefix=outer.prefix + prefix,
        )
        with inside as inner:
            carry, result = body(carry, layer)
        described.update(inner.described)
        return carry, (result, inner.values)

    scanned = (layers, slots)
    transformed = transform(recorded)
    carry, (results, values) = scan_summing_gradients(transformed, carry, scanned, unroll=unroll)
    # All but the scalar of a SummedGradient have a leading axis of layers.
    (count, *_) = {leaf.shape[0] for leaf in jax.tree.leaves(layers) if leaf.ndim}
    for path, one in described.items():
        loop = name if one.layers is None else one.loop
        stacked = (count, *one.shape), (None, *one.axes), one.dtype, one.source, count, loop
        outer.described[prefix + path] = RecordedArray(*stacked)
    outer.values.update({prefix + path: value for path, value in values.items()})
    return carry, results
