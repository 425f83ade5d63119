"""torch.autograd.Function as JAX's custom_vjp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils import _pytree as pytree
from torchax.tensor import Environment, Tensor

from graphtrain.errors import ImportedModelError

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
    places = [i for i, one in enumerate(args) if isinstance(one, torch.Tensor)]
    contexts: list[tuple[Any, Any]] = []  # of the last forward pass: values, structure
    results: list[Any] = []

    def forward(*arrays: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        given = list(args)
        for place, array in zip(places, arrays, strict=True):
            given[place] = Tensor(array, environment)
        context = _Context(len(args))
        with environment, torch.device("jax"), torch.no_grad():
            out = _forward(cls, context, given)
        flat, structure = pytree.tree_flatten(out)
        results[:] = [structure]
        kept, kept_structure = pytree.tree_flatten(vars(context))
        contexts[:] = [([_TENSOR if _is_tensor(one) else one for one in kept], kept_structure)]
        saved = [one.jax() for one in kept if _is_tensor(one)]
        return [one.jax() for one in flat], saved

    @jax.custom_vjp
    def function(*arrays: jax.Array) -> list[jax.Array]:
        return forward(*arrays)[0]

    def backward(saved: list[jax.Array], gradients: list[jax.Array]) -> tuple[jax.Array, ...]:
        ((kept, kept_structure),) = contexts
        arrays = iter(saved[: len(saved) - len(places)])
        filled = [Tensor(next(arrays), environment) if one is _TENSOR else one for one in kept]
        context = _Context(len(args))
        vars(context).update(pytree.tree_unflatten(filled, kept_structure))
        with environment, torch.device("jax"), torch.no_grad():
            wrapped = [Tensor(one, environment) for one in gradients]
            out = cls.backward(context, *wrapped)
        out = out if isinstance(out, tuple) else (out,)
        inputs = saved[len(saved) - len(places) :]
        return tuple(
            jnp.zeros_like(array) if out[place] is None else out[place].jax().astype(array.dtype)
            for place, array in zip(places, inputs, strict=True)
        )

    def forward_saving(*arrays: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        out, saved = forward(*arrays)
        return out, [*saved, *arrays]  # the backward pass needs the inputs' shapes

    function.defvjp(forward_saving, backward)
    out = function(*(args[place].jax() for place in places))
    return pytree.tree_unflatten([Tensor(one, environment) for one in out], results[0])


def _forward(cls: Any, context: _Context, given: list[Any]) -> Any:
    """Call cls.forward, with ctx as its first argument or with a separate setup_context."""
    if cls.setup_context is torch.autograd.function._SingleLevelFunction.setup_context:
        return cls.forward(context, *given)
    out = cls.forward(*given)
    cls.setup_context(context, tuple(given), out)
    return out


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
