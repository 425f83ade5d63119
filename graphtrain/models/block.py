"""A block of the decoder, and how a stack of them is made and applied."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from graphtrain.config.schema import Model
from graphtrain.models.attention.module import Attention
from graphtrain.models.init import Keys
from graphtrain.models.mlp import MLP
from graphtrain.models.moe import MixtureMLP
from graphtrain.models.norms import Norm
from graphtrain.models.projection import PROJECTION
from lowering.tracing.constrain import constrain, draw, reshard
from lowering.tracing.deferred_gradient import complete
from lowering.tracing.weight_layout import as_stored

Auxiliary = dict[str, jax.Array]  # losses beside the cross-entropy, each a weighted float32 scalar


class Block(nnx.Module):
    """Attention and MLP, each normed before and added to the residual stream."""

    def __init__(self, model: Model, keys: Keys):
        self.dropout = model.dropout
        self.post_norm = model.post_norm
        self.attention_norm = Norm(model)
        self.attention = Attention(model, keys)
        self.mlp_norm = Norm(model)
        if model.post_norm:
            self.attention_post_norm, self.mlp_post_norm = Norm(model), Norm(model)
        self.mlp = MLP(model, keys) if model.mixture is None else MixtureMLP(model, keys)

    def __call__(
        self, x: jax.Array, dropout_key: jax.Array | None = None, full: jax.Array | None = None
    ) -> tuple[jax.Array, Auxiliary]:
        """(batch, seq, embed) to the same; without a key nothing is dropped.

        Args:
            full: Whether this layer's queries see all positions before them although the model has
                a window; without it none does.
        """
        for_attention, for_mlp = split_key(dropout_key)
        update = leave(self.attention(enter(self.attention_norm(x)), full))
        if self.post_norm:
            update = self.attention_post_norm(update)
        x = x + dropout(update, self.dropout, for_attention)
        wide = self.mlp(enter(self.mlp_norm(x)))
        update, auxiliary = wide if isinstance(wide, tuple) else (wide, {})
        update = leave(update)
        if self.post_norm:
            update = self.mlp_post_norm(update)
        x = x + dropout(update, self.dropout, for_mlp)
        return residual(x), auxiliary


RESIDUAL = ("batch", "residual", "embed")
WHOLE = ("batch", "seq", "embed")


def enter(x: jax.Array) -> jax.Array:
    """From the residual stream into attention, MLP or head, which work on whole positions.

    x is in pieces until here. Left to itself the partitioner gathers what x is rounded from, in
    float32, which is twice the bytes.
    """
    return reshard(residual(x), WHOLE, RESIDUAL)


def leave(x: jax.Array) -> jax.Array:
    """From attention or MLP, where it is a partial sum on each device, to the residual stream."""
    return reshard(x, RESIDUAL, WHOLE)


def residual(x: jax.Array) -> jax.Array:
    """Place x as the residual stream."""
    return constrain(x, *RESIDUAL)


def split_key(key: jax.Array | None) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
    """Two keys for one, or none for none."""
    if key is None:
        return None, None
    first, second = jax.random.split(key)
    return first, second


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero a part of x, the rate, and scale the rest so that the mean stays; no key: x as it is."""
    if key is None or rate == 0:
        return x
    kept = draw(
        lambda shape: jax.random.bernoulli(key, 1 - rate, shape), x.shape, "batch", "seq", "embed"
    )
    return jnp.where(kept, x / (1 - rate), 0)


def stack_layers(model: Model, keys: Keys) -> Block:
    """All blocks of the model as one, whose parameters have a leading axis of layers."""
    of_layers = jax.random.split(keys(), model.layers)
    return nnx.vmap(lambda key: Block(model, Keys(key)))(of_layers)


def apply_layers(
    model: Model, layers: Block, x: jax.Array, dropout_key: jax.Array | None = None
) -> tuple[jax.Array, Auxiliary]:
    """Run x through all layers of a model, one after the other."""
    keys = layer_keys(model, dropout_key)
    return apply_stack(model, layers, x, keys, full=full_layers(model))


def full_layers(model: Model) -> jax.Array | None:
    """Of each layer whether it has no window, where some have and some have not."""
    if model.full_every is None:
        return None
    return (jnp.arange(model.layers) + 1) % model.full_every == 0


def layer_keys(model: Model, dropout_key: jax.Array | None) -> jax.Array | None:
    """A key for each layer of the model, or none for none."""
    return None if dropout_key is None else jax.random.split(dropout_key, model.layers)


def apply_stack(
    model: Model,
    layers: Block,
    x: jax.Array,
    keys: jax.Array | None = None,
    real: jax.Array | None = None,
    full: jax.Array | None = None,
) -> tuple[jax.Array, Auxiliary]:
    """Run x through a stack of layers; add up what they add to the loss.

    A scan, so that neither the program nor the time to compile it grows with depth, but for the
    layers that the model has written out in a turn.

    Args:
        model: Settings of every layer.
        layers: Whose parameters have a leading axis.
        x: (batch, seq, embed).
        keys: Of each layer, for dropout; without them nothing is dropped.
        real: Of each layer, whether it does anything; without it, all do.
        full: Of each layer, whether it has no window; see full_layers.
    """
    block, parameters = nnx.split(layers)

    def one_layer(x: jax.Array, layer: tuple[Any, ...]) -> tuple[jax.Array, Auxiliary]:
        parameters, key, real, full = layer
        y, auxiliary = nnx.merge(block, _as_stored(complete(parameters)))(x, key, full)
        if real is None:
            return y, auxiliary
        return jnp.where(real, y, x), jax.tree.map(lambda one: jnp.where(real, one, 0), auxiliary)

    body = _checkpoint(one_layer, model)
    each = (parameters, keys, real, full)
    x, auxiliary = jax.lax.scan(body, x, each, unroll=model.unroll)
    return x, jax.tree.map(jnp.sum, auxiliary)


def _as_stored(parameters: Any) -> Any:
    """A layer's parameters, told to lie as they are stored; those in few bits as they are."""

    def store(parameter: nnx.Variable) -> nnx.Variable:
        array = parameter.get_value()
        if not isinstance(array, jax.Array):
            return parameter
        return parameter.replace(as_stored(array, parameter.get_metadata("axes")))

    return jax.tree.map(store, parameters, is_leaf=lambda one: isinstance(one, nnx.Variable))


def _checkpoint(one_layer: Any, model: Model) -> Any:
    """Choose what of a layer the backward pass finds kept; the rest it computes again.

    "dots" keeps the products with weights, named where they are made: a policy that looks for dots
    would keep their float32 sums, twice the bytes, instead of the bfloat16 results.
    """
    if model.remat in ("none", "attention"):  # attention computes its own part again
        return one_layer
    policies = jax.checkpoint_policies
    policy = {
        "dots": policies.save_only_these_names(PROJECTION),
        "full": policies.nothing_saveable,
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[PROJECTION],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[model.remat]
    # A scan keeps the second computation apart; where layers are written out, XLA may take both
    # for one.
    return jax.checkpoint(one_layer, policy=policy, prevent_cse=model.unroll > 1)
