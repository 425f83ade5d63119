"""MLP of a transformer block."""

import jax
from flax import nnx

from graphtrain.config.schema import Model
from graphtrain.models import init
from graphtrain.models.activations import ACTIVATIONS, apply_activation
from graphtrain.models.flops import is_gated
from graphtrain.models.projection import project, project_many
from lowering.tracing.constrain import constrain
from lowering.tracing.recording import record


class MLP(nnx.Module):
    """Up projection, activation, down projection; gated kinds also have a gate projection.

    Source: Shazeer 2020, "GLU variants improve Transformer", https://arxiv.org/abs/2002.05202
    """

    def __init__(self, model: Model, keys: init.ParameterKeys):
        self.model = model
        for name, axes in _wide(model).items():
            setattr(self, name, init.normal(model, keys, "embed", *axes))
        self.down = init.normal(model, keys, "mlp", "embed", scale=(2 * model.layers) ** -0.5)
        if model.bias == "all":
            for name, axes in _wide(model).items():
                setattr(self, f"{name}_bias", init.zeros(model, *axes))
            self.down_bias = init.zeros(model, "embed")

    @jax.named_scope("mlp")
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the MLP's output (batch, seq, embed) for x of the same shape."""
        activate = ACTIVATIONS[self.model.activation]
        gate_up = self._widen(x)
        if not self.model.fused_gate_up:
            names = _wide(self.model)
            gate_up = [
                record(f"mlp/{name}", projection, "batch", "seq", "mlp")
                for name, projection in zip(names, gate_up, strict=True)
            ]
        hidden = record("mlp/hidden", apply_activation(activate, gate_up), "batch", "seq", "mlp")
        return project(self, "down", "bsm,me->bse", hidden)

    def _widen(self, x: jax.Array) -> list[jax.Array]:
        """Return [gate, up], or [up] without a gate, each (batch, seq, mlp)."""
        if self.model.fused_gate_up:
            gate_up = project(self, "gate_up", "bse,epm->bspm", x)
            gate_up = constrain(gate_up, "batch", "seq", None, "mlp")
            return [gate_up[:, :, 0], gate_up[:, :, 1]]
        projections = project_many(self, tuple(_wide(self.model)), "bse,em->bsm", x)
        return [constrain(projection, "batch", "seq", "mlp") for projection in projections]


def _wide(model: Model) -> dict[str, tuple[str | None, ...]]:
    """Return the names of gate and up parameters, with their array axes after embed."""
    if model.fused_gate_up:
        return {"gate_up": (None, "mlp")}  # stacked, so that a device has both of a column
    names = ("gate", "up") if is_gated(model) else ("up",)
    return dict.fromkeys(names, ("mlp",))
