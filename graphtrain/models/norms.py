"""Normalization of the residual stream or of each attention head."""

import jax
import jax.numpy as jnp
from flax import nnx

from graphtrain.config.schema import Model
from graphtrain.models import init
from graphtrain.models.flops import norm_has_bias
from lowering.tracing.cpu_hints import on_cpu


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last axis, computed in float32.

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467;
    Ba et al. 2016, https://arxiv.org/abs/1607.06450
    """

    def __init__(self, model: Model, axis: str = "embed"):
        self.model = model
        self.scale = (init.zeros if model.rms_norm_offset else init.ones)(model, axis)
        if norm_has_bias(model):
            self.bias = init.zeros(model, axis)

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        # XLA:CPU takes 10 to 70 times as long for the sums of the backward pass if the first of
        # three dimensions is 1 (jaxlib 0.10.2): a twelfth of a step with one long sequence.
        if on_cpu() and x.ndim == 3 and len(x) == 1:
            return self._normalized(x[0])[None]
        return self._normalized(x)

    def _normalized(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        if self.model.norm == "layer":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        mean_square = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
        scale = 1 + self.scale[...] if self.model.rms_norm_offset else self.scale[...]
        y = y * jax.lax.rsqrt(mean_square + self.model.norm_epsilon) * scale
        if norm_has_bias(self.model):
            y = y + self.bias[...]
        return y.astype(x.dtype)
