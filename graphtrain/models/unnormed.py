"""Input of the LM head before the model's last norm, which a loss in chunks norms chunk by chunk.

If all of it was normed at once, both arrays would exist until the backward pass of the norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from graphtrain.models.loss_shards import filled
from lowering.tracing.constrain import constrain, shards_of

# Array axes of scales by shard of the tokens and of vocab, as hidden states have them.
_AXES = ("batch", None, "seq", None, "vocab", "embed")

Scales = Any  # nnx.State, or () without a norm


@partial(jax.tree_util.register_dataclass, data_fields=["x", "scales"], meta_fields=["structure"])
@dataclass(frozen=True)
class Unnormed:
    """Residual stream after the layers (batch, seq, embed), and the norm in front of the head."""

    x: jax.Array
    scales: Scales
    structure: nnx.GraphDef[Any] | None  # None: x is normed already

    @classmethod
    def of(cls, norm: nnx.Module, x: jax.Array) -> Unnormed:
        """Return the input of a norm."""
        structure, scales = nnx.split(norm)
        return cls(x, scales, structure)

    def normed(self) -> jax.Array:
        """Return the head's input, of all positions."""
        return self.norm(self.x, self.scales)

    def norm(self, x: jax.Array, scales: Scales) -> jax.Array:
        """Return x normed by scales, which may have leading dimensions as x has."""
        return x if self.structure is None else nnx.merge(self.structure, scales)(x)


@dataclass(frozen=True)
class ChunkNorm:
    """Norm of a chunk's hidden states; none, if these are an array."""

    hidden: jax.Array | Unnormed

    @property
    def x(self) -> jax.Array:
        """Array of which chunks norm their positions."""
        return self.hidden.x if isinstance(self.hidden, Unnormed) else self.hidden

    def scales(self, token_shards: tuple[int, int]) -> Scales:
        """Return the norm's scales by shard, so that gradients of chunks are not reduced.

        Args:
            token_shards: Numbers of shards of batch and of seq.
        """
        if not isinstance(self.hidden, Unnormed):
            return ()
        leading = token_shards[0], 1, token_shards[1], 1, shards_of("vocab")
        gathered = jax.tree.map(lambda scale: constrain(scale, "embed"), self.hidden.scales)
        return jax.tree.map(
            lambda scale: constrain(jnp.broadcast_to(scale, (*leading, *scale.shape)), *_AXES),
            gathered,
        )

    def norm(self, x: jax.Array, scales: Scales) -> jax.Array:
        """Return x, by shard, normed by scales of `scales`."""
        return self.hidden.norm(x, scales) if isinstance(self.hidden, Unnormed) else x

    def gradient(self, of_x: jax.Array, of_scales: Scales) -> jax.Array | Unnormed:
        """Return the gradient of the hidden states: `of_scales` is by shard, and is reduced."""
        if not isinstance(self.hidden, Unnormed):
            return of_x
        summed = jax.tree.map(lambda gradient: gradient.sum(tuple(range(5))), of_scales)
        return Unnormed(of_x, summed, self.hidden.structure)


def zero_scales(scales: Scales, zero: jax.Array) -> Scales:
    """Return zeros like scales by shard, which depend on `zero`."""
    return jax.tree.map(lambda scale: filled(zero, scale.shape, *_AXES), scales)
