"""Mixture-of-experts (MoE) MLP, with two ways to dispatch tokens to experts.

With a capacity (`moe.capacity_factor`), each expert accepts a fixed number of a sequence's tokens,
in sequence order. A token's choices beyond the capacity are dropped: they add nothing to its
result, which may then be only the residual stream. Tokens move to their experts and back by
all-to-all, which the compiler derives from two shardings of one buffer.

Without a capacity, no choice is dropped; see `models.dropless`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from graphtrain.config.schema import Model
from graphtrain.models import init
from graphtrain.models.activations import ACTIVATIONS
from graphtrain.models.attention.ring_order import positions
from graphtrain.models.dropless import ExpertWeight, add_biases, dropless_experts
from graphtrain.models.flops import is_gated
from graphtrain.models.layer_terms import LayerTerms
from graphtrain.models.lora.layers import LoraWeight, plain_array
from graphtrain.models.matmul import dot
from graphtrain.models.projection import PROJECTION, project, project_many
from graphtrain.models.quantized_matmul import parameter_dot
from graphtrain.models.routing import (
    DROPPED,
    layer_terms,
    router_metrics,
    slot_in_expert,
    top_k,
)
from lowering.tracing.constrain import constrain
from lowering.tracing.recording import record

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float


class MixtureMLP(nnx.Module):
    """Router and experts of a mixture-of-experts MLP.

    Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; without capacity: Gale et al.
    2022, "MegaBlocks", https://arxiv.org/abs/2211.15841
    """

    def __init__(self, model: Model, keys: init.ParameterKeys):
        assert model.moe is not None
        self.model, self.mixture = model, model.moe
        self.router = init.normal(model, keys, "embed", "router")
        if is_gated(model):
            self.gate = init.normal(model, keys, "experts", "embed", "mlp")
        self.up = init.normal(model, keys, "experts", "embed", "mlp")
        self.down = init.normal(
            model, keys, "experts", "mlp", "embed", scale=(2 * model.depth) ** -0.5
        )
        if self.mixture.bias_update_rate is not None:
            self.selection_bias = init.buffer(model, "router")
        if self.mixture.expert_bias:
            for name in self._wide_names():
                setattr(self, f"{name}_bias", init.zeros(model, "experts", "mlp"))
            self.down_bias = init.zeros(model, "experts", "embed")
            self.router_bias = init.zeros(model, "router")
        if self.mixture.shared_expert_mlp is not None:
            for name in self._shared_names():
                setattr(self, name, init.normal(model, keys, "embed", "shared"))
            self.shared_down = init.normal(
                model, keys, "shared", "embed", scale=(2 * model.depth) ** -0.5
            )
            if self.mixture.shared_expert_gate:
                self.shared_share = init.zeros(model, "embed")

    @jax.named_scope("mixture")
    def __call__(
        self, x: Float[Array, "batch seq embed"]
    ) -> tuple[Float[Array, "batch seq embed"], LayerTerms]:
        """Return the experts' combined output, and the router's losses and metrics."""
        with jax.named_scope("router"):
            scores = parameter_dot(
                ("router",), "bse,er->bsr", x.astype(jnp.float32), self.router[...], jnp.float32
            )
            if self.mixture.expert_bias:
                scores = scores + self.router_bias[...]
            scores = constrain(scores, "batch", "seq", None)
        scores = record("mlp/router", scores, "batch", "seq", None)
        bias = None if self.mixture.bias_update_rate is None else self.selection_bias[...]
        shares, experts = top_k(scores, self.mixture, bias)
        metrics = router_metrics(scores, experts, self.mixture)
        if self.mixture.capacity_factor is None:
            output = self._dropless(x, shares, experts)
        else:
            output, kept = self._within_capacity(x, shares, experts, self.mixture.capacity_factor)
            shares, metrics[DROPPED] = (
                jnp.where(kept, shares, 0),
                1 - kept.astype(jnp.float32).mean(),
            )
        if self.mixture.expert_bias:
            output = output + self._mean_down_bias(shares, experts).astype(output.dtype)
        if self.mixture.shared_expert_mlp is not None:
            output = output + self._shared(x)
        return output, layer_terms(metrics, self.mixture, self.model.layers)

    @jax.named_scope("shared")
    def _shared(self, x: jax.Array) -> jax.Array:
        """Apply the shared expert to every token; with a gate, scaled by a sigmoid of the token.

        Source: Qwen team 2024, "Qwen1.5-MoE", https://qwenlm.github.io/blog/qwen-moe/
        """
        activate = ACTIVATIONS[self.model.activation]
        projections = project_many(self, self._shared_names(), "bse,em->bsm", x)
        hidden = activate(*(constrain(each, "batch", "seq", "shared") for each in projections))
        output = project(self, "shared_down", "bsm,me->bse", hidden)
        if not self.mixture.shared_expert_gate:
            return output
        score = (x.astype(jnp.float32) * self.shared_share[...]).sum(-1, keepdims=True)
        return output * jax.nn.sigmoid(score).astype(x.dtype)

    def _shared_names(self) -> tuple[str, ...]:
        return ("shared_gate", "shared_up") if is_gated(self.model) else ("shared_up",)

    def _wide_names(self) -> tuple[str, ...]:
        return ("gate", "up") if is_gated(self.model) else ("up",)

    def _weights(self, name: str) -> ExpertWeight:
        value = getattr(self, name).get_value()
        if isinstance(value, LoraWeight):
            return ExpertWeight(plain_array(value.weight), value.a, value.b * value.scale)
        return ExpertWeight(plain_array(value))

    def _within_capacity(
        self, x: jax.Array, shares: jax.Array, experts: jax.Array, capacity: float
    ) -> tuple[jax.Array, jax.Array]:
        """Apply the experts with a fixed number of slots per sequence and expert.

        Returns the output, and which of the choices are not dropped.

        Args:
            x: Tokens (batch, seq, embed).
            shares: Weights of the chosen experts (batch, seq, choices).
            experts: Indices of the chosen experts (batch, seq, choices).
            capacity: Slots of an expert, relative to the mean number of choices per expert.
        """
        count, length = self.mixture.experts, x.shape[1]
        expert_capacity = math.ceil(capacity * length * self.mixture.experts_per_token / count)
        order = positions(length)  # slots fill in sequence order, also under ring attention
        expert_slots = slot_in_expert(experts[:, jnp.argsort(order)], count)[:, order]
        in_capacity = expert_slots < expert_capacity
        slots = jnp.where(
            in_capacity, experts * expert_capacity + expert_slots, count * expert_capacity
        )  # the last slot collects the overflow
        # Token index in each slot; empty slots point to a row of zeros appended to the sequence.
        tokens = jnp.broadcast_to(jnp.arange(length)[:, None], slots.shape[1:])
        fill_slots = jax.vmap(
            lambda index: jnp.full(count * expert_capacity + 1, length).at[index].set(tokens)
        )
        padded = jnp.pad(x, ((0, 0), (0, 1), (0, 0)))
        dispatched = jnp.take_along_axis(padded, fill_slots(slots)[:, :-1, None], axis=1)
        buffer = dispatched.reshape(len(x), count, expert_capacity, -1)
        buffer = constrain(buffer, "dispatch_batch", "experts", "capacity", "embed")
        outputs = self._experts(buffer)
        outputs = constrain(outputs, "batch", None, "capacity", "embed").reshape(
            len(x), count * expert_capacity, -1
        )
        outputs = jnp.pad(outputs, ((0, 0), (0, 1), (0, 0)))
        choice_outputs = jnp.take_along_axis(outputs, slots.reshape(len(x), -1, 1), axis=1)
        choice_outputs = choice_outputs.reshape(*slots.shape, -1)
        share = jnp.where(in_capacity, shares, 0).astype(x.dtype)
        return jnp.einsum("bske,bsk->bse", choice_outputs, share), in_capacity

    def _experts(self, buffer: jax.Array) -> jax.Array:
        """Apply every expert to its slots, (batch, experts, capacity, embed), of the same shape."""
        activate = ACTIVATIONS[self.model.activation]
        projections = [
            constrain(
                self._of_slots(name, "bxce,xem->bxcm", buffer),
                *("dispatch_batch", "experts", "capacity", "mlp"),
            )
            for name in self._wide_names()
        ]
        projections = [checkpoint_name(projection, PROJECTION) for projection in projections]
        biases = [bias[:, None] for bias in self._wide_biases()]
        hidden = activate(*add_biases(projections, biases))
        out = checkpoint_name(self._of_slots("down", "bxcm,xme->bxce", hidden), PROJECTION)
        return constrain(out, "dispatch_batch", "experts", "capacity", "embed")

    def _of_slots(self, name: str, equation: str, slots: jax.Array) -> jax.Array:
        """Multiply the slots of each expert by its matrix."""
        inputs, results = equation.split("->")
        rows, (expert, contracted, output) = inputs.split(",")
        low_rank = results.replace(output, "r")
        weights = self._weights(name)
        product = parameter_dot((name, "experts"), equation, slots, weights.weight)
        if weights.a is None or weights.b is None:
            return product
        with jax.named_scope("adapter"):
            ranks = dot(f"{rows},{expert}{contracted}r->{low_rank}", slots, weights.a)
            return product + dot(f"{low_rank},{expert}r{output}->{results}", ranks, weights.b)

    def _dropless(self, x: jax.Array, shares: jax.Array, experts: jax.Array) -> jax.Array:
        activate = ACTIVATIONS[self.model.activation]

        def combine(projections: list[jax.Array]) -> jax.Array:
            return activate(*projections)

        gate_up, down = [self._weights(name) for name in self._wide_names()], self._weights("down")
        biases = self._wide_biases()
        return dropless_experts(combine, x, shares, experts, gate_up, down, biases)

    def _wide_biases(self) -> list[jax.Array]:
        """Return the biases (experts, mlp) of gate and up, or of up alone; [] without biases."""
        if not self.mixture.expert_bias:
            return []
        return [getattr(self, f"{name}_bias")[...] for name in self._wide_names()]

    def _mean_down_bias(self, shares: jax.Array, experts: jax.Array) -> jax.Array:
        """Return the mean of the chosen experts' down biases (batch, seq, embed), by weight."""
        chosen = jax.nn.one_hot(experts, self.mixture.experts) * shares[..., None]
        return dot("bsx,xe->bse", chosen.sum(-2), self.down_bias[...])
