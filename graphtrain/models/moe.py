"""Mixture-of-experts (MoE) MLP, with two ways to dispatch tokens to experts.

With a capacity (`moe.capacity_factor`), each expert accepts a fixed number of a sequence's tokens,
in sequence order. A token's choices beyond the capacity are dropped: they add nothing to its
result, which may then be only the residual stream. Tokens move to their experts and back by
all-to-all, which the compiler derives from two shardings of one buffer.

Without a capacity (dropless), no choice is dropped: devices along the experts' mesh axes
all-gather their tokens, sort them by expert, multiply each group by its expert's weights (a ragged
product; on NVIDIA GPUs the kernels of `models.grouped_matmul`), and reduce-scatter each token's
sum. Shapes are static, so buffers are large enough for the case that all tokens choose the experts
of one device. Kernels and TPUs multiply only the rows that do; see `grouped_matmul_support`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from graphtrain.config.schema import Model
from graphtrain.models import init
from graphtrain.models.activations import ACTIVATIONS
from graphtrain.models.attention.ring_order import positions
from graphtrain.models.flops import is_gated
from graphtrain.models.grouped_matmul import arrange, grouped_matmul
from graphtrain.models.grouped_matmul_support import BLOCK, why_no_grouped_matmul
from graphtrain.models.layer_terms import LayerTerms
from graphtrain.models.lora.layers import plain_array
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
from lowering.tracing.constrain import constrain, mesh_axes_of, placement
from lowering.tracing.current_target import traced_target
from lowering.tracing.recording import record

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

# Products with gate and up -> hidden values, the input of down.
GateUpFunction = Callable[[list[jax.Array]], jax.Array]


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

    def _weights(self, name: str) -> jax.Array:
        return plain_array(getattr(self, name).get_value())

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
                parameter_dot((name, "experts"), "bxce,xem->bxcm", buffer, self._weights(name)),
                *("dispatch_batch", "experts", "capacity", "mlp"),
            )
            for name in self._wide_names()
        ]
        projections = [checkpoint_name(projection, PROJECTION) for projection in projections]
        biases = [bias[:, None] for bias in self._wide_biases()]
        hidden = activate(*_add_biases(projections, biases))
        product = parameter_dot(
            ("down", "experts"), "bxcm,xme->bxce", hidden, self._weights("down")
        )
        out = checkpoint_name(product, PROJECTION)
        return constrain(out, "dispatch_batch", "experts", "capacity", "embed")

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


def dropless_experts(
    combine: GateUpFunction,
    x: Float[Array, "batch seq embed"],
    shares: Float[Array, "batch seq choices"],
    experts: Int[Array, "batch seq choices"],
    gate_up: list[jax.Array],
    down: jax.Array,
    biases: list[jax.Array] | None = None,
) -> Float[Array, "batch seq embed"]:
    """Apply to each token the experts that it chose, without dropping any (dropless MoE).

    Args:
        combine: Computes hidden values, the input of `down`, from the products with `gate_up`.
        x: Tokens.
        shares: Weights of the chosen experts in the token's result.
        experts: Indices of the chosen experts.
        gate_up: Gate and up weights, or up alone, each (experts, embed, mlp).
        down: Down weights (experts, mlp, embed).
        biases: Biases (experts, mlp) of the products with `gate_up`; without them, there are none.
    """
    biases = biases or []
    context = placement()
    run = partial(_sorted_experts, combine)
    tokens, expert_axes, mlp_axes = (
        (mesh_axes_of("batch") or None, mesh_axes_of("seq") or None),
        mesh_axes_of("experts"),
        mesh_axes_of("mlp"),
    )
    axes = {name for names in (*tokens, expert_axes, mlp_axes) if names for name in names}
    if context is None or not axes:
        return run((), (), x, shares, experts, gate_up, down, biases)
    token_spec = PartitionSpec(*tokens)
    gate_up_spec = PartitionSpec(expert_axes or None, None, mlp_axes or None)
    down_spec = PartitionSpec(expert_axes or None, mlp_axes or None)
    weight_specs = [gate_up_spec] * len(gate_up), down_spec, [down_spec] * len(biases)
    return jax.shard_map(
        partial(run, expert_axes, mlp_axes),
        mesh=context.current_mesh,
        in_specs=(token_spec, token_spec, token_spec, *weight_specs),
        out_specs=token_spec,
        axis_names=axes,
        check_vma=False,
    )(x, shares, experts, gate_up, down, biases)


def _sorted_experts(
    combine: GateUpFunction,
    expert_axes: tuple[str, ...],
    mlp_axes: tuple[str, ...],
    x: jax.Array,
    shares: jax.Array,
    experts: jax.Array,
    gate_up_weights: list[jax.Array],
    down: jax.Array,
    biases: list[jax.Array],
) -> jax.Array:
    """Apply the experts of this device to the tokens of all devices that share them.

    Args:
        combine: As in dropless_experts.
        expert_axes: Mesh axes that shard the experts.
        mlp_axes: Mesh axes that shard the hidden width of an expert.
        x: Tokens of this device (batch, seq, embed).
        shares: Weights of their chosen experts (batch, seq, choices).
        experts: Global indices of their chosen experts (batch, seq, choices).
        gate_up_weights: This device's shard of the gate and up weights.
        down: This device's shard of the down weights.
        biases: This device's shard of the biases of gate and up; [] without biases.
    """
    shape = x.shape
    tokens = [array.reshape(-1, array.shape[-1]) for array in (x, shares, experts)]
    if expert_axes:
        tokens = [_gather(array, expert_axes) for array in tokens]
    x, shares, experts = tokens
    shards = jax.lax.axis_size(expert_axes) if expert_axes else 1
    first_expert = jax.lax.axis_index(expert_axes) * len(down) if expert_axes else 0
    is_local = (experts >= first_expert) & (experts < first_expert + len(down))
    local_experts = jnp.where(is_local, experts - first_expert, len(down))
    local_shares = jnp.where(is_local, shares, 0)
    apply = (
        _experts_in_blocks
        if _has_grouped_matmul(down, experts.size)
        else _experts_by_ragged_product
    )
    total = apply(combine, x, local_shares, local_experts, gate_up_weights, down, biases, shards)
    if mlp_axes:
        total = jax.lax.psum(total, mlp_axes)
    if expert_axes:
        total = jax.lax.psum_scatter(total, expert_axes, tiled=True)
    return total.reshape(shape).astype(x.dtype)


def _gather(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """All-gather the first dimension over mesh axes, in float32 on CPUs.

    The gradient is a reduce-scatter, and XLA:CPU aborts on one of bfloat16 inside a shard_map
    (jaxlib 0.10). It sends 16-bit floats as float32 anyway.
    """
    target, sent = traced_target(), array
    if target is not None and target.platform == "cpu" and array.dtype != jnp.float32:
        sent = array.astype(jnp.float32)
    return jax.lax.all_gather(sent, axes, tiled=True).astype(array.dtype)


def _has_grouped_matmul(down: jax.Array, choices: int) -> bool:
    target = traced_target()
    if target is None:
        return False
    experts, mlp, embed = down.shape
    return not why_no_grouped_matmul(target, experts, embed, mlp, choices)


def _experts_by_ragged_product(
    combine: GateUpFunction,
    x: jax.Array,
    shares: jax.Array,
    experts: jax.Array,
    gate_up_weights: list[jax.Array],
    down: jax.Array,
    biases: list[jax.Array],
    shards: int,
) -> jax.Array:
    """Return each token's float32 sum over its choices of this device's experts.

    Args:
        combine: As in dropless_experts.
        x: Tokens (tokens, embed).
        shares: Weights of their chosen experts (tokens, choices); 0 for experts of other devices.
        experts: Chosen experts, counted on this device; its number of experts for others.
        gate_up_weights: Gate and up weights of this device's experts.
        down: Down weights of this device's experts.
        biases: Biases of gate and up of this device's experts; [] without biases.
        shards: Number of devices over which the experts are sharded.
    """
    del shards
    chosen, sort_key = experts.shape[-1], experts.reshape(-1)
    order = jnp.argsort(sort_key, stable=True)  # choices of other devices' experts sort last
    # A sum of comparisons: bincount is an integer scatter-add, which Neuron does not support.
    sizes = (sort_key[:, None] == jnp.arange(len(down))).sum(0, dtype=jnp.int32)
    rows = jnp.take(x, order // chosen, axis=0)
    product = partial(_ragged, sizes=sizes)
    projections = [checkpoint_name(product(rows, w), PROJECTION) for w in gate_up_weights]
    of_rows = [jnp.take(bias, sort_key[order], axis=0, mode="clip") for bias in biases]
    hidden = combine(_add_biases(projections, of_rows))
    out = checkpoint_name(product(hidden, down), PROJECTION).astype(jnp.float32)
    share = shares.reshape(-1)[order]
    return jnp.zeros((len(x), out.shape[-1])).at[order // chosen].add(out * share[:, None])


def _experts_in_blocks(
    combine: GateUpFunction,
    x: jax.Array,
    shares: jax.Array,
    experts: jax.Array,
    gate_up_weights: list[jax.Array],
    down: jax.Array,
    biases: list[jax.Array],
    shards: int,
) -> jax.Array:
    """Return what _experts_by_ragged_product does, with grouped matrix products."""
    chosen = experts.shape[-1]
    blocks = arrange(experts.reshape(-1), len(down))
    tokens = (
        jnp.full(blocks.rows, len(x))
        .at[blocks.slots]
        .set(jnp.arange(experts.size) // chosen, mode="drop")
    )  # padding is a row of zeros
    rows = jnp.take(x, tokens, axis=0, mode="fill", fill_value=0)
    # The last block of an expert is half full on average.
    expected = experts.size // shards + len(down) * BLOCK // 2

    def product(rows: jax.Array, weights: jax.Array) -> jax.Array:
        out = grouped_matmul(rows, weights.astype(rows.dtype), blocks, expected)
        return checkpoint_name(out, PROJECTION)

    of_rows = [jnp.repeat(bias[blocks.experts], BLOCK, axis=0) for bias in biases]
    hidden = combine(_add_biases([product(rows, each) for each in gate_up_weights], of_rows))
    out = product(hidden, down)
    choices = jnp.take(out, blocks.slots, axis=0, mode="fill", fill_value=0)
    choices = choices.reshape(*experts.shape, -1).astype(jnp.float32)
    return (choices * shares[..., None]).sum(1)


def _add_biases(products: list[jax.Array], biases: list[jax.Array]) -> list[jax.Array]:
    """Add biases to products, whose gradients are summed in float32; [] changes nothing."""
    if not biases:
        return products
    pairs = zip(products, biases, strict=True)
    return [(x.astype(jnp.float32) + bias).astype(x.dtype) for x, bias in pairs]


def _ragged(rows: jax.Array, expert_weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiply groups of rows, each by its expert's matrix; rows after the last group are zero."""
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    out = jax.lax.ragged_dot(
        rows,
        expert_weights.astype(rows.dtype),
        sizes,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    is_assigned = jnp.arange(len(rows)) < sizes.sum()
    return jnp.where(is_assigned[:, None], out, 0).astype(rows.dtype)
