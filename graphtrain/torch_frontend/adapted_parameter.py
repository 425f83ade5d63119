"""Parameters of an imported module that are quantized or have LoRA factors, and their tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from torchax.tensor import Environment, Tensor

from graphtrain.errors import ImportedModelError
from graphtrain.models.lora.layers import QuantizedWeight, plain_array
from graphtrain.models.matmul import dot
from lowering.tracing.constrain import draw_shard
from lowering.tracing.deferred_gradient import attach_reductions

_LETTERS = "abcdfgh"  # of leading dimensions


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "a", "b", "key"],
    meta_fields=["scale", "dropout", "order"],
)
class AdaptedParameter:
    """Frozen parameter and its two LoRA factors, in PEFT's shapes."""

    def __init__(
        self,
        weight: jax.Array | QuantizedWeight,
        a: jax.Array,  # (rank, in), or (experts, rank, in)
        b: jax.Array,  # (out, rank), or (experts, out, rank)
        key: jax.Array | None,  # dropout key; None: no dropout
        scale: float,
        dropout: float,
        order: str,  # of the weight's axes: "oi", "io", "eoi" or "eio"
    ):
        self.weight, self.a, self.b, self.key = weight, a, b, key
        self.scale, self.dropout, self.order = scale, dropout, order

    def with_weight(self, weight: jax.Array) -> AdaptedParameter:
        """Return the same factors beside another weight."""
        return AdaptedParameter(
            weight, self.a, self.b, self.key, self.scale, self.dropout, self.order
        )

    @jax.named_scope("adapter")
    def product(self, x: jax.Array) -> jax.Array:
        """Return x (..., in) times both factors (..., out), after dropout, times the scale."""
        rows = _LETTERS[: x.ndim - 1]
        low_rank = dot(f"{rows}i,ri->{rows}r", self._dropped(x), self.a)
        return dot(f"{rows}r,or->{rows}o", low_rank, self.b) * self.scale

    def _dropped(self, x: jax.Array) -> jax.Array:
        if self.key is None:
            return x
        key, rate = self.key, self.dropout
        axes = ("batch", "seq", "embed") if x.ndim == 3 else ("batch", *("embed",) * (x.ndim - 1))
        mask = draw_shard(lambda shape: jax.random.bernoulli(key, 1 - rate, shape), x.shape, *axes)
        return jnp.where(mask, x / (1 - rate), 0)

    def merged(self, dtype: DTypeLike) -> jax.Array:
        """Return the weight plus the scaled product of the factors.

        Raises:
            ImportedModelError: there is dropout, which only the input of a linear layer can have.
        """
        if self.key is not None:
            raise ImportedModelError(
                f"program.adapter.dropout = {self.dropout} applies to the input of a linear layer, "
                "and this module computes with an adapted weight in another way; set dropout = 0, "
                "or leave the weight out of target_modules"
            )
        experts = "e" if "e" in self.order else ""
        equation = f"{experts}or,{experts}ri->{self.order}"
        product = dot(equation, self.b, self.a) * self.scale
        return (plain_array(self.weight).astype(product.dtype) + product).astype(dtype)


Parameter = jax.Array | QuantizedWeight | AdaptedParameter


def is_adapted(value: Any) -> bool:
    """Return whether a value is a quantized parameter, or one with LoRA factors."""
    return isinstance(value, AdaptedParameter | QuantizedWeight)


def cast_adapted(parameter: AdaptedParameter | QuantizedWeight, dtype: DTypeLike) -> Parameter:
    """Return a parameter for a computation in this dtype; factors stay float32."""
    if isinstance(parameter, QuantizedWeight):
        return parameter
    if isinstance(parameter.weight, QuantizedWeight):
        return parameter
    return parameter.with_weight(attach_reductions(parameter.weight).astype(dtype))


class AdaptedTensor(Tensor):
    """Tensor of a quantized parameter, or of one with LoRA factors.

    Linear layers multiply by `parameter`; any other operation gets the merged weight.
    """

    @staticmethod
    def __new__(
        cls, parameter: AdaptedParameter | QuantizedWeight, env: Environment, dtype: DTypeLike
    ):
        return Tensor.__new__(cls, _shape(parameter, dtype), env)

    def __init__(
        self, parameter: AdaptedParameter | QuantizedWeight, env: Environment, dtype: DTypeLike
    ):
        super().__init__(_shape(parameter, dtype), env)  # pyright: ignore[reportArgumentType]
        self.parameter, self._computes_in = parameter, dtype

    def multiplied(
        self, x: jax.Array, order: str, multiply: Callable[[jax.Array, jax.Array], jax.Array]
    ) -> jax.Array:
        """Return the product of x (..., in) with the parameter.

        Args:
            x: Input of a linear layer.
            order: Order of the axes in which the layer reads the weight.
            multiply: Product with a plain weight.
        """
        parameter = self.parameter
        if isinstance(parameter, QuantizedWeight):
            return _frozen_product(x, parameter, multiply)
        if parameter.order != order:
            return multiply(x, self.jax())
        return _frozen_product(x, parameter.weight, multiply) + parameter.product(x)

    def jax(self) -> jax.Array:
        """Return the array that the module computes with."""
        if isinstance(self.parameter, QuantizedWeight):
            return self.parameter.dequantize()
        return self.parameter.merged(self._computes_in)


def _frozen_product(
    x: jax.Array,
    weight: jax.Array | QuantizedWeight,
    multiply: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    if not isinstance(weight, QuantizedWeight):
        return multiply(x, weight)

    def dequantizing(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
        return multiply(x, weight.dequantize())

    # The backward pass dequantizes again, instead of saving the dequantized weights.
    return jax.checkpoint(dequantizing, prevent_cse=False)(x, weight)


def _shape(parameter: AdaptedParameter | QuantizedWeight, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    weight = parameter.weight if isinstance(parameter, AdaptedParameter) else parameter
    shape = jax.eval_shape(plain_array, weight).shape
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
