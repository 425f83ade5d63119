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

_Sampler = Callable[..., jax.Array]


def override_random_operations(environment: Environment) -> None:
    """Let the operations draw by the environment's key, which follows the seed of a run."""
    for operation, sampler in _IN_PLACE.items():
        draw = _in_place(environment, sampler)
        environment.override_op_definition(getattr(torch.Tensor, operation), draw)
        # What functions of PyTorch call, such as gumbel_softmax.
        environment.override_op_definition(getattr(torch.ops.aten, operation), draw)
    environment.override_op_definition(torch.normal, _normal_function(environment))
    for multinomial in (torch.multinomial, torch.ops.aten.multinomial):
        environment.override_op_definition(multinomial, _multinomial_function(environment))


def _in_place(environment: Environment, sampler: _Sampler) -> Callable[..., Tensor]:
    def draw(
        tensor: Tensor, *args: Any, generator: torch.Generator | None = None, **settings: Any
    ) -> Tensor:
        key = environment.get_and_rotate_prng_key(generator)
        drawn = sampler(key, tensor.jax(), *args, **settings)
        return tensor.apply_jax_(lambda array: drawn.astype(array.dtype))

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
            key = environment.get_and_rotate_prng_key(generator)
            like = jax.ShapeDtypeStruct(tuple(size), mappings.t2j_dtype(dtype))
            return Tensor(_normal(key, like, mean, std).astype(like.dtype), environment)
        like = torch.broadcast_tensors(torch.as_tensor(mean), torch.as_tensor(std))[0]
        drawn = torch.empty_like(like).normal_(generator=generator)
        return mean + std * drawn

    return normal


def _multinomial_function(environment: Environment) -> Callable[..., Tensor]:
    """Return torch.multinomial, by which torch.distributions.Categorical samples."""

    def multinomial(
        weights: Tensor,
        num_samples: int,
        replacement: bool = False,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        key = environment.get_and_rotate_prng_key(generator)
        logits = jnp.log(weights.jax().astype(jnp.float32))
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


def _exponential(key: jax.Array, x: jax.Array, lambd: float = 1.0) -> jax.Array:
    drawn = jax.random.exponential(key, x.shape, _drawn_dtype(x)) / lambd
    return jnp.maximum(drawn, jnp.finfo(x.dtype).tiny)  # as in PyTorch, whose logarithm is finite


def _cauchy(key: jax.Array, x: jax.Array, median: float = 0.0, sigma: float = 1.0) -> jax.Array:
    return median + sigma * jax.random.cauchy(key, x.shape, _drawn_dtype(x))


def _random(
    key: jax.Array, x: jax.Array, start: int | None = None, end: int | None = None
) -> jax.Array:
    """Draw integers: below `end` from `start`; below `start` if it is alone; else of the dtype."""
    low, high = (0, start) if end is None else (start, end)
    if high is None:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        # The largest integers that the dtype holds exactly, and int32 draws.
        high = 1 << min(jnp.finfo(x.dtype).nmant + 1, 30) if is_float else jnp.iinfo(x.dtype).max
    return jax.random.randint(key, x.shape, low or 0, high)


_IN_PLACE: dict[str, _Sampler] = {
    "normal_": _normal,
    "exponential_": _exponential,
    "cauchy_": _cauchy,
    "random_": _random,
}
