# A gated linear recurrence: set program.model.flax to "recurrence.py:Recurrence".
# Every weight names its array axes, so that the rules of program.rules shard it.

import jax
import jax.numpy as jnp
from flax import nnx


class Block(nnx.Module):
    def __init__(self, embed, mlp, dtype, rngs):
        def weight(shape, axes):
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape), axes=axes)

        self.dtype = dtype
        self.gate = weight((embed, mlp), ("embed", "mlp"))
        self.up = weight((embed, mlp), ("embed", "mlp"))
        self.down = weight((mlp, embed), ("mlp", "embed"))

    def __call__(self, x):  # (batch, seq, embed)
        gate = jax.nn.sigmoid(x @ self.gate[...].astype(self.dtype))
        update = (1 - gate) * (x @ self.up[...].astype(self.dtype))
        combine = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])  # noqa: E731
        _, hidden = jax.lax.associative_scan(combine, (gate, update), axis=1)
        return x + hidden @ self.down[...].astype(self.dtype)


class Recurrence(nnx.Module):
    def __init__(self, vocab, dtype, rngs, embed=64, mlp=256, blocks=2):
        table = 0.02 * jax.random.normal(rngs.params(), (vocab, embed))
        self.tokens = nnx.Param(table, axes=("vocab", "embed"))
        self.blocks = nnx.List([Block(embed, mlp, dtype, rngs) for _ in range(blocks)])
        self.dtype = dtype

    def __call__(self, tokens):  # (batch, seq) -> logits (batch, seq, vocab)
        x = self.tokens[...].astype(self.dtype)[tokens]
        for block in self.blocks:
            x = block(x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6))
        return x @ self.tokens[...].astype(self.dtype).T
