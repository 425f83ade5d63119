"""Settings of an MLP that runs in blocks of hidden columns, and the shapes of its arrays.

Where mesh axes shard the columns (tensor parallelism), each device has blocks of its own columns.
Activations and the columns of weights then have one dimension more, the shards: the sum over a
device's blocks is local, and the sum over the shards reduces it once, not once for each block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from graphtrain.models.activations import Activation, apply_activation
from graphtrain.models.matmul import dot
from lowering.tracing.constrain import Axes, constrain, constrain_tree
from lowering.tracing.tpu_hints import cast_where_used
from sharding_rules.arrays import ArraySpec

Weights = Mapping[str, jax.Array]  # by name: gate, up, down, gate_bias, up_bias


@dataclass(frozen=True)
class BlockedMLP:
    """Settings of an MLP in blocks.

    Shapes, below: with more than one shard, the stream is (shards, batch, seq, embed), hidden
    values are (shards, batch, seq, columns), and weights (embed, shards, columns) or (shards,
    columns, embed); with one, all of them are without the dimension of shards.
    """

    blocks: int
    width: str  # array axis of the hidden columns
    names: tuple[str, ...]  # of the projections to hidden columns: gate and up, or up
    activate: Activation
    shards: int = 1  # of the hidden columns

    def axes(self, name: str) -> Axes:
        """Return the array axes of a weight."""
        columns = (self.width,) if self.shards == 1 else (self.width, None)
        if name.endswith("_bias"):
            return columns
        return (*columns, "embed") if name == "down" else ("embed", *columns)

    def columns(self, name: str) -> int:
        """Return the dimension of a weight's columns, of those of one shard."""
        return self.axes(name).index(self.width) + (self.shards > 1)

    def split(self, weights: Weights, blocks: int) -> list[Weights]:
        """Return the weights of each block of columns."""
        parts = {name: jnp.split(w, blocks, self.columns(name)) for name, w in weights.items()}
        return [{name: part[index] for name, part in parts.items()} for index in range(blocks)]

    def split_shards(self, weights: Weights) -> Weights:
        """Return weights whose columns are two dimensions, shards and those of a shard."""
        if self.shards == 1:
            return weights
        return {name: self._split_shards(name, w) for name, w in weights.items()}

    def _split_shards(self, name: str, weight: jax.Array) -> jax.Array:
        at, shape = self.columns(name) - 1, weight.shape
        return weight.reshape(*shape[:at], self.shards, -1, *shape[at + 1 :])

    def merge_shards(self, weights: Weights) -> Weights:
        """Return weights, or their gradients, in the shapes before split_shards."""
        if self.shards == 1:
            return weights
        return {name: self._merge_shards(name, w) for name, w in weights.items()}

    def _merge_shards(self, name: str, weight: jax.Array) -> jax.Array:
        at, shape = self.columns(name) - 1, weight.shape
        return weight.reshape(*shape[:at], -1, *shape[at + 2 :])

    def to_shards(self, x: jax.Array) -> jax.Array:
        """Return x (batch, seq, embed), of which each device has all, once for each shard."""
        if self.shards == 1:
            return x
        each = jnp.broadcast_to(x, (self.shards, *x.shape))
        return constrain(each, self.width, "batch", "seq", "embed")

    def sum_shards(self, x: jax.Array) -> jax.Array:
        """Return the sum over shards (batch, seq, embed); devices exchange it in the dtype of x."""
        if self.shards == 1:
            return x
        return jax.lax.reduce(x, jnp.zeros((), x.dtype), jax.lax.add, (0,))

    def gathered(self, weights: Weights, dtype: DTypeLike) -> Weights:
        """Return a block's weights in `dtype`, gathered once for all products that use them."""
        # Left to itself XLA's partitioner gathers the float32 values, which is twice the bytes.
        cast = {name: cast_where_used(w, dtype) for name, w in weights.items()}
        stored = constrain_tree(cast, self._specs(cast), "parameter")
        return {name: constrain(w, *self.axes(name)) for name, w in stored.items()}

    def reduced(self, gradients: Weights) -> Weights:
        """Shard a block's gradients as the optimizer state is."""
        return constrain_tree({**gradients}, self._specs(gradients), "optimizer")

    def _specs(self, weights: Weights) -> dict[str, ArraySpec]:
        return {name: ArraySpec(w.shape, self.axes(name)) for name, w in weights.items()}

    def widen(self, name: str, x: jax.Array, weights: Weights) -> jax.Array:
        """Return hidden values, gate or up, of the stream x."""
        product = self._multiply(name, x, weights[name])
        bias = weights.get(f"{name}_bias")
        if bias is not None:
            bias = bias if self.shards == 1 else bias[:, None, None]
            product += bias.astype(product.dtype)
        return self._constrain_hidden(product)

    def activated(self, wide: list[jax.Array]) -> jax.Array:
        """Return the values that the last product reads, of those of gate and up."""
        return self._constrain_hidden(apply_activation(self.activate, wide))

    @jax.named_scope("down")
    def down(self, hidden: jax.Array, weight: jax.Array) -> jax.Array:
        """Return the last product, a stream; with several shards, what each adds to it."""
        return self._multiply("down", hidden, weight)

    def _multiply(self, name: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        of_x, of_weight, of_product = self._letters(name)
        return dot(f"{of_x},{of_weight}->{of_product}", x, weight)

    def weight_gradient(
        self, name: str, x: jax.Array, gradient: jax.Array, dtype: DTypeLike
    ) -> jax.Array:
        """Return the gradient of a weight that multiplied x, of the product's gradient."""
        of_x, of_weight, of_product = self._letters(name)
        with jax.named_scope(name):
            return dot(f"{of_x},{of_product}->{of_weight}", x, gradient, dtype)

    def _letters(self, name: str) -> tuple[str, str, str]:
        """Return the letters of einsum equations: of the operand, the weight and the product."""
        shards = "" if self.shards == 1 else "t"
        stream, hidden = f"{shards}bse", f"{shards}bsm"
        is_down = name == "down"
        weight = f"{shards}me" if is_down else f"e{shards}m"
        return (hidden, weight, stream) if is_down else (stream, weight, hidden)

    def _constrain_hidden(self, x: jax.Array) -> jax.Array:
        axes = ("batch", "seq", self.width)
        return (
            constrain(x, *axes) if self.shards == 1 else constrain(x, self.width, *axes[:2], None)
        )
