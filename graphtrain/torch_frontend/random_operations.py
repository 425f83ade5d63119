"""Operations that draw random numbers, which torchax lacks or computes wrongly in silence.

torchax leaves a tensor as it is under exponential_ and cauchy_, draws floats for random_, takes the
second argument of torch.normal for the first, and draws every row of torch.multinomial alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torchax.ops import mappings
from torchax.tensor import Environment, Tensor

from graphtrain.torch_frontend import private_torch

_Sampler = Callable[..., jax.Array]
_ENDS = {"from": "start", "to": "end"}  # PyTorch's names of arguments


def override_random_operations(environment: Environment) -> None:
    """Let the operations draw by the environment's key, which follows the seed of a run.

    A generator that a module passes is ignored: by its seed, every step would draw alike.
    """
    for operation, sampler in _IN_PLACE.items():
        draw = _in_place(environment, sampler)
        environment.override_op_definition(getattr(torch.Tensor, operation), draw)
        # What functions of PyTorch call, such as gumbel_softmax.
        environment.override_op_definition(getattr(torch.ops.aten, operation), draw)
    for operation, sampler in (("rand_like", _uniform), ("randn_like", _normal)):
        draw = _like_function(environment, sampler)
        environment.override_op_definition(getattr(torch, operation), draw)
        environment.override_op_definition(getattr(torch.ops.aten, operation), draw)
    environment.override_op_definition(torch.normal, _normal_function(environment))
    for multinomial in (torch.multinomial, torch.ops.aten.multinomial):
        environment.override_op_definition(multinomial, _multinomial_function(environment))


def _in_place(environment: Environment, sampler: _Sampler) -> Callable[..., Tensor]:
    def draw(
        tensor: Tensor, *args: Any, generator: torch.Generator | None = None, **settings: Any
    ) -> Tensor:
        key = environment.get_and_rotate_prng_key()
        named = {_ENDS.get(name, name): value for name, value in settings.items()}
        drawn = sampler(key, tensor.jax(), *args, **named)
        return tensor.apply_jax_(lambda array: drawn.astype(array.dtype))

    return draw


def _like_function(environment: Environment, sampler: _Sampler) -> Callable[..., Tensor]:
    """Return torch.rand_like or torch.randn_like, whose result has the dtype of the tensor."""

    def draw(
        tensor: Tensor,
        *,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
        **_: Any,
    ) -> Tensor:
        key = environment.get_and_rotate_prng_key()
        array = tensor.jax()
        like = jax.ShapeDtypeStruct(
            array.shape, array.dtype if dtype is None else mappings.t2j_dtype(dtype)
        )
        return Tensor(sampler(key, like).astype(like.dtype), environment)

    return draw


def _normal_function(environment: Environment) -> Callable[..., Tensor]:
    """Return torch.normal: of a mean and a deviation, each a number or a tensor."""

    def normal(
        mean: Any,
        std: Any = 1.0,
        size: Any = None,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        **_: Any,
    ) -> Tensor:
        if size is not None:
            dtype = dtype or torch.get_default_dtype()
            key = environment.get_and_rotate_prng_key()
            like = jax.ShapeDtypeStruct(tuple(size), mappings.t2j_dtype(dtype))
            return Tensor(_normal(key, like, mean, std).astype(like.dtype), environment)
        arrays = [each.jax() for each in (mean, std) if private_torch.is_traced(each)]
        shape = jnp.broadcast_shapes(*(array.shape for array in arrays))
        like = jax.ShapeDtypeStruct(shape, jnp.result_type(*arrays))
        drawn = _normal(environment.get_and_rotate_prng_key(), like).astype(like.dtype)
        return mean + std * Tensor(drawn, environment)

    return normal


def _multinomial_function(environment: Environment) -> Callable[..., Tensor]:
    """Return torch.multinomial, by which torch.distributions.Categorical samples."""

    def multinomial(
        input: Tensor,
        num_samples: int,
        replacement: bool = False,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        key = environment.get_and_rotate_prng_key()
        logits = jnp.log(input.jax().astype(jnp.float32))
        if replacement or num_samples == 1:
            shape = (*logits.shape[:-1], num_samples)
            drawn = jax.random.categorical(key, logits[..., None, :], shape=shape)
        else:  # the largest of logits with Gumbel noise are drawn without replacement
            noisy = logits + jax.random.gumbel(key, logits.shape)
            drawn = jax.lax.top_k(noisy, num_samples)[1]
        return Tensor(drawn.astype(mappings.t2j_dtype(torch.int64)), environment)

    return multinomial


def _drawn_dtype(x: jax.Array | jax.ShapeDtypeStruct) -> Any:
    """Return the dtype in which numbers are drawn: one of 16 bits has too few for their tails."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _normal(
    key: jax.Array, x: jax.Array | jax.ShapeDtypeStruct, mean: float = 0.0, std: float = 1.0
) -> jax.Array:
    return mean + std * jax.random.normal(key, x.shape, _drawn_dtype(x))


def _uniform(
    key: jax.Array, x: jax.Array | jax.ShapeDtypeStruct, start: float = 0.0, end: float = 1.0
) -> jax.Array:
    """Draw from `start` up to, but not including, `end`, also after rounding to 16 bits."""
    drawn = jax.random.uniform(key, x.shape, _drawn_dtype(x), start, end).astype(x.dtype)
    return jnp.minimum(drawn, end - (end - start) * jnp.finfo(x.dtype).epsneg)


def _exponential(key: jax.Array, x: jax.Array, lambd: float = 1.0) -> jax.Array:
    """Draw numbers of which none is 0, as in PyTorch, so that their logarithm is finite."""
    dtype = _drawn_dtype(x)
    drawn = jax.random.exponential(key, x.shape, dtype)
    return jnp.maximum(drawn, jnp.finfo(dtype).eps / 2) / lambd


def _cauchy(key: jax.Array, x: jax.Array, median: float = 0.0, sigma: float = 1.0) -> jax.Array:
    return median + sigma * jax.random.cauchy(key, x.shape, _drawn_dtype(x))


def _random(
    key: jax.Array, x: jax.Array, start: int | None = None, end: int | None = None
) -> jax.Array:
    """Draw integers: below `end` from `start`; below `start` if it is alone; else of the dtype."""
    low, high = (0, start) if end is None else (start, end)
    if high is None:
        # The largest integers that the dtype holds exactly, and int32 draws.
        if jnp.issubdtype(x.dtype, jnp.floating):
            high = 1 << min(jnp.finfo(x.dtype).nmant + 1, 30)
        elif x.dtype == jnp.bool_:
            high = 2
        else:
            high = min(jnp.iinfo(x.dtype).max, jnp.iinfo(jnp.int32).max - 1) + 1
    return jax.random.randint(key, x.shape, low or 0, high)


_IN_PLACE: dict[str, _Sampler] = {
    "normal_": _normal,
    "uniform_": _uniform,
    "exponential_": _exponential,
    "cauchy_": _cauchy,
    "random_": _random,
}
