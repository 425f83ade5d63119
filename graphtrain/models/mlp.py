"""The MLP of a block."""

from functools import partial

import jax
from flax import nnx

from graphtrain.config.schema import Model
from graphtrain.models import weights
from graphtrain.models.counts import is_gated
from graphtrain.models.projection import project, projects
from lowering.constrain import constrain

_ACTIVATIONS = {
    "swiglu": jax.nn.silu,
    "geglu": partial(jax.nn.gelu, approximate=False),
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


class MLP(nnx.Module):
    """Up, activation, down; the gated kinds multiply the activation by a second projection.

    Source: Shazeer 2020, "GLU variants improve Transformer", https://arxiv.org/abs/2002.05202
    """

    def __init__(self, model: Model, rngs: nnx.Rngs):
        self.model = model
        if is_gated(model):
            self.gate = weights.normal(model, rngs, "embed", "mlp")
        self.up = weights.normal(model, rngs, "embed", "mlp")
        self.down = weights.normal(model, rngs, "mlp", "embed", scale=(2 * model.layers) ** -0.5)
        if model.bias == "all":
            if is_gated(model):
                self.gate_bias = weights.zeros(model, "mlp")
            self.up_bias = weights.zeros(model, "mlp")
            self.down_bias = weights.zeros(model, "embed")

    @jax.named_scope("mlp")
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, seq, embed) to the same."""
        activate = _ACTIVATIONS[self.model.activation]
        names = ("gate", "up") if is_gated(self.model) else ("up",)
        wide = projects(self, names, "bse,em->bsm", x)
        *gate, up = (constrain(each, "batch", "seq", "mlp") for each in wide)
        hidden = activate(gate[0]) * up if gate else activate(up)
        return project(self, "down", "bsm,me->bse", hidden)
