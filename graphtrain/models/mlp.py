"""MLP of a transformer block."""

from functools import partial
from typing import Any

import jax
from flax import nnx

from graphtrain.config.schema import Model
from graphtrain.models import init
from graphtrain.models.activations import ACTIVATIONS, apply_activation
from graphtrain.models.blocked_mlp import BlockedMLP
from graphtrain.models.flops import is_gated
from graphtrain.models.mlp_blocks import current_mlp_blocks, mlp_in_blocks
from graphtrain.models.mlp_gradients import are_mlp_weights_first, multiply_weights_first
from graphtrain.models.projection import project, project_many
from lowering.tracing.constrain import constrain, shards_of
from lowering.tracing.recording import is_recording, record


class MLP(nnx.Module):
    """Up projection, activation, down projection; gated kinds also have a gate projection.

    Source: Shazeer 2020, "GLU variants improve Transformer", https://arxiv.org/abs/2002.05202
    """

    def __init__(self, model: Model, keys: init.ParameterKeys, width: str = "mlp"):
        """Build the MLP; `width` is the array axis of its hidden values."""
        self.model, self.width = model, width
        for name, axes in _wide(model, width).items():
            setattr(self, name, init.normal(model, keys, "embed", *axes))
        self.down = init.normal(model, keys, width, "embed", scale=(2 * model.depth) ** -0.5)
        if model.bias == "all":
            for name, axes in _wide(model, width).items():
                setattr(self, f"{name}_bias", init.zeros(model, *axes))
            self.down_bias = init.zeros(model, "embed")

    @jax.named_scope("mlp")
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the MLP's output (batch, seq, embed) for x of the same shape."""
        activate = ACTIVATIONS[self.model.activation]
        if (blocks := current_mlp_blocks()) > 1 and not is_recording():
            return self._in_blocks(blocks, x)
        gate_up = self._widen(x)
        if not self.model.fused_gate_up:
            names = _wide(self.model, self.width)
            gate_up = [
                record(f"mlp/{name}", projection, "batch", "seq", self.width)
                for name, projection in zip(names, gate_up, strict=True)
            ]
        hidden = record(
            "mlp/hidden", apply_activation(activate, gate_up), "batch", "seq", self.width
        )
        if are_mlp_weights_first():
            return self._project_weights_first(("down",), "bsm,me->bse", hidden)[0]
        return project(self, "down", "bsm,me->bse", hidden)

    def _in_blocks(self, blocks: int, x: jax.Array) -> jax.Array:
        names = tuple(_wide(self.model, self.width))
        activate = ACTIVATIONS[self.model.activation]
        shards = shards_of(self.width)
        mlp = BlockedMLP(blocks, self.width, names, activate, shards)
        biases = [f"{name}_bias" for name in names if self.model.bias == "all"]
        weights = {name: getattr(self, name).get_value() for name in (*names, "down", *biases)}
        y: Any = mlp_in_blocks(mlp, x, weights)
        return y + self.down_bias[...].astype(y.dtype) if biases else y

    def _widen(self, x: jax.Array) -> list[jax.Array]:
        """Return [gate, up], or [up] without a gate, each (batch, seq, mlp)."""
        if self.model.fused_gate_up:
            gate_up = project(self, "gate_up", "bse,epm->bspm", x)
            gate_up = constrain(gate_up, "batch", "seq", None, self.width)
            return [gate_up[:, :, 0], gate_up[:, :, 1]]
        names = tuple(_wide(self.model, self.width))
        if are_mlp_weights_first():
            projections = self._project_weights_first(names, "bse,em->bsm", x)
        else:
            projections = project_many(self, names, "bse,em->bsm", x)
        return [constrain(projection, "batch", "seq", self.width) for projection in projections]

    def _project_weights_first(
        self, names: tuple[str, ...], equation: str, x: jax.Array
    ) -> list[jax.Array]:
        multiply = partial(multiply_weights_first, self.width)
        return project_many(self, names, equation, x, multiply)


def _wide(model: Model, width: str) -> dict[str, tuple[str | None, ...]]:
    """Return the names of gate and up parameters, with their array axes after embed."""
    if model.fused_gate_up:
        return {"gate_up": (None, width)}  # stacked, so that a device has both of a column
    names = ("gate", "up") if is_gated(model) else ("up",)
    return dict.fromkeys(names, (width,))
