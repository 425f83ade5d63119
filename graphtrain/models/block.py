"""Transformer block of the decoder, and how a stack of blocks is built and applied."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from graphtrain.config.schema import Model
from graphtrain.models.attention.latent import LatentAttention
from graphtrain.models.attention.module import Attention
from graphtrain.models.init import ParameterKeys
from graphtrain.models.layer_terms import NO_TERMS, LayerTerms
from graphtrain.models.mlp import MLP
from graphtrain.models.mlp_blocks import current_mlp_blocks
from graphtrain.models.moe import MixtureMLP
from graphtrain.models.norms import Norm
from graphtrain.models.projection import PROJECTION
from lowering.tracing.constrain import constrain, draw_shard, mesh_axes_of, reshard
from lowering.tracing.deferred_gradient import attach_reductions
from lowering.tracing.recording import is_recording, record, scan_layers
from lowering.tracing.tpu_hints import on_tpu
from lowering.tracing.weight_layout import keep_stored_layout


class Block(nnx.Module):
    """Transformer block: pre-normed attention and MLP, each added to the residual stream."""

    def __init__(self, model: Model, keys: ParameterKeys, is_dense: bool = False):
        """Build a block; one that `is_dense` has an MLP also in a model with mixtures."""
        self.dropout = model.dropout
        self.post_norm = model.post_norm
        self.attention_norm = Norm(model)
        is_latent = model.latent_attention is not None
        self.attention = (LatentAttention if is_latent else Attention)(model, keys)
        self.mlp_norm = Norm(model)
        if model.post_norm:
            self.attention_post_norm, self.mlp_post_norm = Norm(model), Norm(model)
        if model.moe is None or is_dense:
            self.mlp = MLP(model, keys, "dense_mlp" if is_dense else "mlp")
        else:
            self.mlp = MixtureMLP(model, keys)

    def __call__(
        self,
        x: jax.Array,
        dropout_key: jax.Array | None = None,
        full: bool | jax.Array | None = None,
    ) -> tuple[jax.Array, LayerTerms]:
        """Return the new residual stream (batch, seq, embed) and the block's terms.

        Args:
            x: Residual stream (batch, seq, embed).
            dropout_key: Random key; without it there is no dropout.
            full: Whether this layer has global attention although the model has a sliding window;
                without it, the model's window applies. An array in a scan over layers.
        """
        attention_key, mlp_key = split_key(dropout_key)
        update = scatter_residual(self._attend(x, full))
        update = record("attention/output", update, *RESIDUAL_AXES)
        if self.post_norm:
            update = record("attention_post_norm", self.attention_post_norm(update), *RESIDUAL_AXES)
        x = x + dropout(update, self.dropout, attention_key)
        x = record("attention_residual", x, *RESIDUAL_AXES)
        normed = record("mlp_norm", self.mlp_norm(x), *RESIDUAL_AXES)
        mlp_output = self.mlp(gather_residual(normed))
        update, terms = mlp_output if isinstance(mlp_output, tuple) else (mlp_output, NO_TERMS)
        update = record("mlp/output", scatter_residual(update), *RESIDUAL_AXES)
        if self.post_norm:
            update = record("mlp_post_norm", self.mlp_post_norm(update), *RESIDUAL_AXES)
        x = x + dropout(update, self.dropout, mlp_key)
        return record("output", constrain_residual(x), *RESIDUAL_AXES), terms

    def _attend(self, x: jax.Array, full: bool | jax.Array | None) -> jax.Array:
        attention = self.attention
        if isinstance(attention, Attention) and _norms_again():
            return attention(x, full, GatheredNorm(self.attention_norm))
        normed = record("attention_norm", self.attention_norm(x), *RESIDUAL_AXES)
        return attention(gather_residual(normed), full)


def _norms_again() -> bool:
    """Return whether the backward pass norms the input of attention again.

    It does so with MLPs in blocks. Where the residual stream is gathered between both (sequence
    parallelism), GPUs gather it again, too, one time more beside eleven in a layer. TPUs do not:
    XLA for TPUs computes nothing beside such a gather.
    """
    is_gathered = mesh_axes_of("residual") == mesh_axes_of("seq")
    return current_mlp_blocks() > 1 and not is_recording() and (is_gathered or not on_tpu())


class GatheredNorm(nnx.Module):
    """Normalization of the residual stream, gathered for attention or the MLP."""

    def __init__(self, norm: Norm):
        self.norm = norm

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the normed x (batch, seq, embed), of which each device has all positions."""
        return gather_residual(self.norm(x))


RESIDUAL_AXES = ("batch", "residual", "embed")
GATHERED_AXES = ("batch", "seq", "embed")


def gather_residual(x: jax.Array) -> jax.Array:
    """Gather the residual stream for attention, MLP or LM head, which need all positions.

    x is sharded by position until here (sequence parallelism). Left to itself XLA's partitioner
    gathers the float32 values that x is rounded from, which is twice the bytes.
    """
    return reshard(constrain_residual(x), GATHERED_AXES, RESIDUAL_AXES)


def scatter_residual(x: jax.Array) -> jax.Array:
    """Scatter the output of attention or MLP, a partial sum per device, to the residual stream."""
    return reshard(x, RESIDUAL_AXES, GATHERED_AXES)


def constrain_residual(x: jax.Array) -> jax.Array:
    """Constrain x (batch, seq, embed) to the residual stream's sharding."""
    return constrain(x, *RESIDUAL_AXES)


def split_key(key: jax.Array | None) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
    """Split a random key in two; return (None, None) for None."""
    if key is None:
        return None, None
    first, second = jax.random.split(key)
    return first, second


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero elements of x with probability `rate` and rescale the others to keep the mean.

    Without a key, x is returned unchanged. x is (batch, seq, embed).
    """
    if key is None or rate == 0:
        return x
    keep_mask = draw_shard(
        lambda shape: jax.random.bernoulli(key, 1 - rate, shape), x.shape, "batch", "seq", "embed"
    )
    return jnp.where(keep_mask, x / (1 - rate), 0)


def stack_layers(model: Model, keys: ParameterKeys) -> Block:
    """Build all blocks of the model as one, whose parameters have a leading layer axis."""
    keys_by_layer = jax.random.split(keys(), model.layers)
    return nnx.vmap(lambda key: Block(model, ParameterKeys(key)))(keys_by_layer)


def stack_dense_layers(model: Model, keys: ParameterKeys) -> Block:
    """Build the model's dense layers before those of a mixture, as stack_layers does the others."""
    keys_by_layer = jax.random.split(keys(), model.dense_layers)
    return nnx.vmap(lambda key: Block(model, ParameterKeys(key), is_dense=True))(keys_by_layer)


def apply_dense_layers(
    model: Model, layers: Block, x: jax.Array, dropout_key: jax.Array | None = None
) -> jax.Array:
    """Run x (batch, seq, embed) through the dense layers before those of a mixture."""
    keys = None if dropout_key is None else jax.random.split(dropout_key, model.dense_layers)
    x, _ = apply_stack(model, layers, x, keys, name="dense_layers")
    return x


def apply_layers(
    model: Model, layers: Block, x: jax.Array, dropout_key: jax.Array | None = None
) -> tuple[jax.Array, LayerTerms]:
    """Run x (batch, seq, embed) through all layers of a model; see apply_stack."""
    keys = layer_keys(model, dropout_key)
    return apply_stack(model, layers, x, keys, full=global_attention_layers(model))


def global_attention_layers(model: Model) -> jax.Array | None:
    """Return which layers have global attention, bool (layers,); None if all layers are alike."""
    if model.global_attention_every is None:
        return None
    return has_global_attention(model, jnp.arange(model.layers))


def has_global_attention(model: Model, layer: Any) -> Any:
    """Return whether a layer of a model with global_attention_every has global attention.

    Args:
        model: Settings.
        layer: Index of the layer, or an array of indices.
    """
    return (layer + 1) % model.global_attention_every == 0


def layer_keys(model: Model, dropout_key: jax.Array | None) -> jax.Array | None:
    """Return one dropout key per layer, or None without a dropout key."""
    return None if dropout_key is None else jax.random.split(dropout_key, model.layers)


def apply_stack(
    model: Model,
    layers: Block,
    x: jax.Array,
    keys: jax.Array | None = None,
    is_layer: jax.Array | None = None,
    full: jax.Array | None = None,
    name: str = "layers",
) -> tuple[jax.Array, LayerTerms]:
    """Run x through a stack of layers and sum their terms.

    Layers run in a scan, so that neither the program nor its compile time grows with depth;
    `model.unroll` layers are unrolled in each iteration.

    Args:
        model: Settings of every layer.
        layers: Blocks, whose parameters have a leading layer axis.
        x: (batch, seq, embed).
        keys: Dropout key of each layer; without them there is no dropout.
        is_layer: Whether each row is a layer; other rows, the padding of pipeline stages, leave x
            unchanged. Without it, all rows are layers.
        full: Whether each layer has global attention; see global_attention_layers.
        name: Name of the stack, under which activations are recorded.
    """
    block, parameters = nnx.split(layers)

    def one_layer(x: jax.Array, layer: tuple[Any, ...]) -> tuple[jax.Array, LayerTerms]:
        parameters, key, row_is_layer, full = layer
        y, terms = nnx.merge(block, _keep_layouts(attach_reductions(parameters)))(x, key, full)
        if row_is_layer is None:
            return y, terms
        return jnp.where(row_is_layer, y, x), jax.tree.map(
            lambda term: jnp.where(row_is_layer, term, 0), terms
        )

    scanned = (parameters, keys, is_layer, full)
    remat = partial(with_remat, model=model)
    unroll = model.unroll
    x, terms = scan_layers(one_layer, x, scanned, name=name, transform=remat, unroll=unroll)
    return x, jax.tree.map(jnp.sum, terms)


def _keep_layouts(parameters: Any) -> Any:
    """Keep the layouts of a layer's plain arrays; quantized and LoRA weights are unchanged."""

    def store(parameter: nnx.Variable) -> nnx.Variable:
        array = parameter.get_value()
        if not isinstance(array, jax.Array):
            return parameter
        return parameter.replace(keep_stored_layout(array, parameter.get_metadata("axes")))

    return jax.tree.map(store, parameters, is_leaf=lambda node: isinstance(node, nnx.Variable))


def with_remat(one_layer: Any, model: Model, *, in_scan: bool = True) -> Any:
    """Apply the model's activation checkpointing (remat) policy to a layer.

    "dots" saves the products with weights, named where they are computed: a policy that matches
    dots would save their float32 sums, twice the bytes, instead of the bfloat16 results.
    """
    if model.remat in ("none", "attention"):  # models.attention recomputes its scores
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
    # A scan separates the recomputation from the forward pass; in unrolled layers, XLA could
    # merge both by common subexpression elimination (CSE).
    separates = in_scan and model.unroll == 1
    return jax.checkpoint(one_layer, policy=policy, prevent_cse=not separates)
