"""torch.autograd.Function as JAX's custom_vjp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils import _pytree as pytree
from torchax.tensor import Environment, Tensor

from graphtrain.errors import ImportedModelError
from graphtrain.torch_frontend import private_torch

_TENSOR = object()  # placeholder for a saved tensor


class _Context:
    """The ctx argument: what a forward pass saves for its backward pass."""

    def __init__(self, inputs: int) -> None:
        self.saved_tensors: tuple[Any, ...] = ()
        self.needs_input_grad = (True,) * inputs

    def save_for_backward(self, *tensors: Any) -> None:
        """Save tensors for the backward pass."""
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: JAX always materialises gradients."""

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Do nothing: the backward pass returns None for them anyway."""

    def mark_dirty(self, *tensors: Any) -> None:
        """Refuse changes in place."""
        raise ImportedModelError(
            "an autograd.Function marks an input as changed in place (mark_dirty), but JAX "
            "arrays are immutable; return a new tensor"
        )


def apply_function(cls: Any, args: tuple[Any, ...], environment: Environment) -> Any:
    """Compute cls.apply(*args); JAX differentiates it by cls.backward.

    Args:
        cls: a subclass of torch.autograd.Function.
        args: of the call.
        environment: already entered; the backward pass, which JAX traces later, enters it again.
    """
    tensor_indices = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    contexts: list[tuple[Any, Any]] = []  # of the last forward pass: values, structure
    results: list[Any] = []

    def forward(*arrays: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        filled_args = list(args)
        for index, array in zip(tensor_indices, arrays, strict=True):
            filled_args[index] = Tensor(array, environment)
        context = _Context(len(args))
        with environment, torch.device("jax"), torch.no_grad():
            out = _forward(cls, context, filled_args)
        flat, structure = pytree.tree_flatten(out)
        results[:] = [structure]
        leaves, context_structure = pytree.tree_flatten(vars(context))
        contexts[:] = [
            (
                [_TENSOR if private_torch.is_traced(leaf) else leaf for leaf in leaves],
                context_structure,
            )
        ]
        saved = [leaf.jax() for leaf in leaves if private_torch.is_traced(leaf)]
        return [tensor.jax() for tensor in flat], saved

    @jax.custom_vjp
    def function(*arrays: jax.Array) -> list[jax.Array]:
        return forward(*arrays)[0]

    def backward(saved: list[jax.Array], gradients: list[jax.Array]) -> tuple[jax.Array, ...]:
        ((leaves, context_structure),) = contexts
        arrays = iter(saved[: len(saved) - len(tensor_indices)])
        filled = [Tensor(next(arrays), environment) if leaf is _TENSOR else leaf for leaf in leaves]
        context = _Context(len(args))
        vars(context).update(pytree.tree_unflatten(filled, context_structure))
        with environment, torch.device("jax"), torch.no_grad():
            wrapped = [Tensor(gradient, environment) for gradient in gradients]
            out = cls.backward(context, *wrapped)
        out = out if isinstance(out, tuple) else (out,)
        inputs = saved[len(saved) - len(tensor_indices) :]
        return tuple(
            jnp.zeros_like(array) if out[index] is None else out[index].jax().astype(array.dtype)
            for index, array in zip(tensor_indices, inputs, strict=True)
        )

    def forward_saving(*arrays: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        out, saved = forward(*arrays)
        return out, [*saved, *arrays]  # the backward pass needs the inputs' shapes

    function.defvjp(forward_saving, backward)
    out = function(*(args[index].jax() for index in tensor_indices))
    return pytree.tree_unflatten([Tensor(out_array, environment) for out_array in out], results[0])


def _forward(cls: Any, context: _Context, args: list[Any]) -> Any:
    """Call cls.forward, with ctx as its first argument or with a separate setup_context."""
    if cls.setup_context is torch.autograd.function._SingleLevelFunction.setup_context:
        return cls.forward(context, *args)
    out = cls.forward(*args)
    cls.setup_context(context, tuple(args), out)
    return out
