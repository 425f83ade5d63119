"""Initial arrays of an imported model, made as the module's constructor makes its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import torch

from graphtrain.errors import ImportedModelError
from graphtrain.torch_frontend import private_torch
from graphtrain.torch_frontend.bridge import Tensor, TraceEnvironment
from graphtrain.torch_frontend.meta_module import ORTHOGONAL, InitOperation, MetaModule
from graphtrain.torch_frontend.random_values import RandomValue

Operations = tuple[InitOperation, ...]


def initial_arrays(
    meta: MetaModule,
    names_by_path: Mapping[str, Sequence[str]],
    is_stacked: Callable[[str], bool],
    key: jax.Array,
) -> dict[str, jax.Array]:
    """Return new parameters, initialised as the module's constructor initialises its own.

    Args:
        meta: The module without weights.
        names_by_path: Names of the parameters in the array at each path.
        is_stacked: Whether the array at a path has a row for each name.
        key: Random key.

    Raises:
        ImportedModelError: the initial values of a parameter are unknown.
    """
    keys = jax.random.split(key, len(names_by_path))
    parameters = meta.parameters()
    arrays = {}
    for (path, names), array_key in zip(sorted(names_by_path.items()), keys, strict=True):
        shape = tuple(parameters[names[0]].shape)
        operations = [_known_operations(meta, name) for name in names]
        if is_stacked(path):
            arrays[path] = _stacked_array(operations, shape, array_key)
        else:
            arrays[path] = _initial_array(operations[0], shape, array_key)
    return arrays


def _known_operations(meta: MetaModule, name: str) -> Operations:
    if operations := meta.initializers[name]:
        return operations
    raise ImportedModelError(
        f"the initial values of {name} are unknown: its constructor does not fill it by "
        "torch.nn.init or an in-place method of tensors; fill the parameter so, not a tensor "
        "that becomes one (for example by torch.nn.init.normal_), and the init graph can "
        "repeat it"
    )


def _stacked_array(
    operations: Sequence[Operations], shape: tuple[int, ...], key: jax.Array
) -> jax.Array:
    """Return an array with a row for each parameter; equal operations are traced once."""
    keys, first = jax.random.split(key, len(operations)), operations[0]
    if all(_same_operations(of_row, first) for of_row in operations):
        return jax.vmap(lambda row_key: _initial_array(first, shape, row_key))(keys)
    rows = [
        _initial_array(of_row, shape, row_key)
        for of_row, row_key in zip(operations, keys, strict=True)
    ]
    return jnp.stack(rows)


def _initial_array(operations: Operations, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Return a float32 array that the operations initialise."""
    environment = TraceEnvironment()
    tensor = Tensor(jnp.zeros(shape, jnp.float32), environment)
    with (
        environment.override_property(prng=key),
        environment,
        torch.device("jax"),
        torch.no_grad(),
    ):
        for operation in operations:
            if operation.method == "copy_":
                (values,) = operation.arguments
                if isinstance(values, RandomValue):
                    values = values.compute().jax()  # pyright: ignore[reportAttributeAccessIssue]
                array = jnp.asarray(values, jnp.float32)
                same_size = array.size == math.prod(shape)
                filled = array.reshape(shape) if same_size else jnp.broadcast_to(array, shape)
                private_torch.set_array(tensor, filled)
            elif operation.method == ORTHOGONAL:
                draw = jax.nn.initializers.orthogonal(*operation.arguments)
                private_torch.set_array(tensor, draw(environment.get_and_rotate_prng_key(), shape))
            else:
                operation.apply(tensor)
    return tensor.jax()


def _same_operations(first: Operations, second: Operations) -> bool:
    return repr(first) == repr(second)
