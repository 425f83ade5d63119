"""Decoder-only transformer, and its pure functions of nested dicts of arrays.

These dicts are what is compiled, sharded, cached and checkpointed. In `layers` every array has a
leading layer axis. Parameters of norms and biases are named "scale", "bias" or "..._bias".
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from graphtrain.config.schema import Model
from graphtrain.models import init
from graphtrain.models.ahead import AheadModule
from graphtrain.models.attention import kv_cache
from graphtrain.models.attention.ring_order import axis_to_ring_order, document_positions
from graphtrain.models.attention.score_mods import soft_cap
from graphtrain.models.block import (
    GATHERED_AXES,
    RESIDUAL_AXES,
    apply_dense_layers,
    apply_layers,
    constrain_residual,
    dropout,
    gather_residual,
    split_key,
    stack_dense_layers,
    stack_layers,
)
from graphtrain.models.head_gradient import reduce_head_first
from graphtrain.models.layer_terms import LayerTerms
from graphtrain.models.matmul import dot
from graphtrain.models.norms import Norm
from graphtrain.models.quantized_matmul import parameter_dot
from graphtrain.models.shapes import STACKS
from graphtrain.models.unnormed import Unnormed
from graphtrain.models.vocab_padding import mask_padding
from lowering.tracing.constrain import constrain, in_shard_map
from lowering.tracing.cpu_hints import materialize
from lowering.tracing.deferred_gradient import attach_reductions
from lowering.tracing.recording import is_recording, record
from sharding_rules.arrays import ArraySpec

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

Parameters = Mapping[str, Any]  # nested dicts whose leaves are arrays


class Embedding(nnx.Module):
    """Token embedding and, for learned positions, position embedding.

    Token ids beyond the vocabulary are embedded as NaN.
    """

    def __init__(self, model: Model, keys: init.ParameterKeys):
        self.model = model
        self.tokens = init.normal(model, keys, "vocab", "embed")
        if model.embedding_norm:
            self.norm = Norm(model)
        if model.positions == "learned":
            self.positions = init.normal(model, keys, "positions", "embed")

    @jax.named_scope("embedding")
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the embeddings (batch, seq, embed) of token ids (batch, seq).

        Raises:
            ValueError: the sequence is longer than the table of learned positions.
        """
        # First with unsharded positions: straight to the residual stream's sharding, XLA would
        # gather the vocabulary.
        rows = embedding_lookup(self.tokens[...], tokens, self.model.dtype, in_shard_map())
        x = constrain_residual(constrain(jnp.asarray(rows), *GATHERED_AXES))
        if self.model.scaled_embedding:
            x = x * jnp.asarray(self.model.embed**0.5, x.dtype)
        if self.model.positions == "learned":
            length, rows = tokens.shape[1], self.model.max_position_embeddings
            if rows is not None and length > rows:
                raise ValueError(
                    f"sequences of {length} tokens are longer than model.max_position_embeddings "
                    f"= {rows}, the "
                    "number of learned positions; use shorter sequences"
                )
            if (in_documents := document_positions()) is not None:
                # Gather the table over embed before the lookup, as for token ids.
                table = constrain(self.positions[:length], "positions", "embed")
                x = x + constrain(jnp.take(table, in_documents, axis=0), *GATHERED_AXES)
            elif (new_positions := kv_cache.cache_positions(length)) is not None:
                x = x + jnp.take(self.positions[...], new_positions, axis=0, mode="clip")
            else:
                x = x + constrain(axis_to_ring_order(self.positions[:length], 0), "seq", "embed")
        if self.model.embedding_norm:
            x = self.norm(x)
        return x.astype(self.model.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def embedding_lookup(
    table: jax.Array, tokens: jax.Array, dtype: str, by_product: bool
) -> jax.Array:
    """Return rows of an embedding table in `dtype`; gradients are summed in the table's dtype.

    The table (vocab, embed) is gathered over embed before the lookup, because the token ids
    (batch, seq) are sharded over the same devices. A table that is sharded over vocab stays so:
    each device looks up the rows that it holds.

    Args:
        table: Embedding (vocab, embed).
        tokens: Token ids (batch, seq).
        dtype: Dtype of the result.
        by_product: Sum the gradients by a matrix product. XLA's partitioner crashes on a scatter
            inside a shard_map over part of the mesh (jax 0.11).
    """
    if table.dtype == jnp.bfloat16 and dtype == "float32":
        # XLA:CPU converts what it looks up to float32: the whole table, if it may be done once
        # before a loop over tokens. After a barrier inside the loop, it converts the rows.
        table, tokens = materialize((table, tokens))
        return jnp.take(constrain(table, "vocab", "embed"), tokens, axis=0).astype(dtype)
    return jnp.take(constrain(table.astype(dtype), "vocab", "embed"), tokens, axis=0)


def _rows_forward(
    table: jax.Array, tokens: jax.Array, dtype: str, use_matmul: bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return embedding_lookup(table, tokens, dtype, use_matmul), (table, tokens)


def _rows_backward(
    dtype: str,
    use_matmul: bool,
    residuals: tuple[jax.Array, jax.Array],
    gradient: jax.Array,
) -> tuple[jax.Array, None]:
    table, tokens = residuals
    if use_matmul:
        one_hot = jax.nn.one_hot(tokens, table.shape[0], dtype=dtype)
        return dot("bsv,bse->ve", one_hot, gradient, table.dtype), None
    return _sum_by_token(table.shape, table.dtype, tokens, gradient), None


def _sum_by_token(
    shape: tuple[int, ...], dtype: DTypeLike, tokens: jax.Array, gradient: jax.Array
) -> jax.Array:
    """Return the gradients (..., embed) of the looked-up rows, summed by token id like a table.

    Of a pipeline's microbatches, which jax.vmap embeds, it is one sum. JAX would make one table for
    each microbatch, and XLA would reduce each over the devices before it adds them.
    """

    @jax.custom_batching.custom_vmap
    def total(tokens: jax.Array, gradient: jax.Array) -> jax.Array:
        return jnp.zeros(shape, dtype).at[tokens].add(gradient.astype(dtype))

    @total.def_vmap
    def of_microbatches(
        axis_size: int, is_batched: Sequence[bool], tokens: jax.Array, gradient: jax.Array
    ) -> tuple[jax.Array, bool]:
        assert all(is_batched), "microbatches with the same tokens"
        return total(tokens, gradient), False

    return total(tokens, gradient)


embedding_lookup.defvjp(_rows_forward, _rows_backward)


class Decoder(nnx.Module):
    """Embedding, layers, final norm and LM head."""

    def __init__(self, model: Model, keys: init.ParameterKeys):
        self.model = model
        self.embedding = Embedding(model, keys)
        if model.dense_layers:
            self.dense_layers = stack_dense_layers(model, keys)
        self.layers = stack_layers(model, keys)
        self.final_norm = Norm(model)
        if model.ahead_layers:
            self.ahead = AheadModule(model, keys)
        if not model.tie_word_embeddings:
            self.head = init.normal(model, keys, "embed", "vocab")

    def hidden(
        self, tokens: jax.Array, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, LayerTerms]:
        """Return normed hidden states (batch, seq, embed) and the layers' terms."""
        x, terms = self.after_layers(tokens, dropout_key)
        return record("final_norm", self.final_norm(x), *RESIDUAL_AXES), terms

    def after_layers(
        self, tokens: jax.Array, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, LayerTerms]:
        """Return the residual stream (batch, seq, embed) that leaves `layers`, and their terms."""
        embedding_key, layers_key = split_key(dropout_key)
        x = self.before_layers(tokens, embedding_key)
        return apply_layers(self.model, self.layers, x, layers_key)

    def embed(self, tokens: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        """Return embedded tokens (batch, seq, embed) after dropout."""
        return dropout(constrain_residual(self.embedding(tokens)), self.model.dropout, dropout_key)

    def before_layers(self, tokens: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        """Return the residual stream (batch, seq, embed) that enters `layers`.

        Token ids (batch, seq) are embedded, and run through the dense layers, if there are any.
        """
        x = record("embedding", self.embed(tokens, dropout_key), *RESIDUAL_AXES)
        if not self.model.dense_layers:
            return x
        dense_key = None if dropout_key is None else jax.random.fold_in(dropout_key, 1)
        return apply_dense_layers(self.model, self.dense_layers, x, dense_key)

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Return float32 logits (batch, seq, vocab) of normed hidden states (batch, seq, embed)."""
        return self.logits(*self.head_operands(hidden))

    @jax.named_scope("head")
    def head_operands(self, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return normed hidden states (batch, seq, embed), gathered, and the head's weights."""
        x, head = gather_residual(hidden), self.head_weights()
        if self.model.tie_word_embeddings:  # the gradient is reduced with that of the lookups
            return x, head
        return reduce_head_first(x, head, ("embed", "vocab"))

    @jax.named_scope("head")
    def logits(self, x: jax.Array, head: jax.Array) -> jax.Array:
        """Return float32 logits (batch, seq, vocab) of what head_operands returns."""
        tied = self.model.tie_word_embeddings
        equation = "bse,ve->bsv" if tied else "bse,ev->bsv"
        scores = parameter_dot(("head",), equation, x, head, jnp.float32)
        capped = soft_cap(scores, self.model.final_logit_softcap)
        return constrain(mask_padding(capped, self.model.vocab_tokens), "batch", "seq", "vocab")

    def head_weights(self) -> jax.Array:
        """Return the LM head's weights (embed, vocab); if tied to the embedding, (vocab, embed)."""
        tied = self.model.tie_word_embeddings
        head = self.embedding.tokens.get_value() if tied else self.head.get_value()
        return _unit_length(head, axis=1 if tied else 0) if self.model.unit_norm_head else head


def _unit_length(weights: jax.Array, axis: int) -> jax.Array:
    """Divide weights by their L2 norm along an axis, at least 1e-12, as PyTorch's normalize."""
    squares = jnp.sum(jnp.square(weights.astype(jnp.float32)), axis, keepdims=True)
    # The maximum is inside the square root, so that rows of zeros have finite gradients.
    return (weights * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))).astype(weights.dtype)


def parameter_specs(model: Model) -> dict[str, Any]:
    """Return the tree of parameters as ArraySpecs, without allocating arrays."""
    _, state = _abstract(model)
    return nnx.to_pure_dict(jax.tree.map_with_path(_spec, state, is_leaf=_is_variable))


def initialize(model: Model, key: jax.Array) -> dict[str, Any]:
    """Return newly initialized float32 parameters, in the tree of parameter_specs."""
    return nnx.to_pure_dict(nnx.state(Decoder(model, init.ParameterKeys(key))))


def forward(
    model: Model,
    parameters: Parameters,
    tokens: Int[Array, "batch seq"],
    *,
    dropout_key: jax.Array | None = None,
) -> tuple[Float[Array, "batch seq vocab"], LayerTerms]:
    """Return float32 logits (batch, seq, vocab) and the layers' terms.

    Without a dropout key there is no dropout.
    """
    decoder = merge(model, parameters)
    x, terms = decoder.hidden(tokens, dropout_key)
    return decoder.unembed(x), terms


def head_inputs(
    model: Model,
    parameters: Parameters,
    tokens: Int[Array, "batch seq"],
    *,
    dropout_key: jax.Array | None = None,
) -> tuple[Unnormed, jax.Array, LayerTerms]:
    """Return the LM head's input before its norm, the head's weights, and the layers' terms.

    The input is gathered from the residual stream's sharding; the weights are those of the LM head,
    or of the embedding if they are tied. Without a dropout key there is no dropout.
    """
    decoder = merge(model, parameters)
    x, terms = decoder.after_layers(tokens, dropout_key)
    if is_recording():  # of all positions, which have a gradient
        x = record("final_norm", decoder.final_norm(x), *RESIDUAL_AXES)
    with jax.named_scope("head"):
        x, head = gather_residual(x), decoder.head_weights()
        axes = ("vocab", "embed") if model.tie_word_embeddings else ("embed", "vocab")
        x, head = reduce_head_first(x, head, axes)
    hidden = Unnormed(x, (), None) if is_recording() else Unnormed.of(decoder.final_norm, x)
    return hidden, head, terms


def head_inputs_ahead(
    model: Model,
    parameters: Parameters,
    hidden: Float[Array, "batch seq embed"],
    next_tokens: Int[Array, "batch seq"],
    *,
    dropout_key: jax.Array | None = None,
) -> tuple[Float[Array, "batch seq embed"], LayerTerms]:
    """Return the LM head's input for the token after the next, and the terms of its block.

    Args:
        model: Settings, with mtp_loss_weight.
        parameters: Weights.
        hidden: The LM head's input for the next tokens, from head_inputs.
        next_tokens: Ids of the next tokens.
        dropout_key: Random key; without it there is no dropout.
    """
    decoder, embedded = merge(model, parameters), embed_next(model, parameters, next_tokens)
    x, terms = decoder.ahead(constrain_residual(hidden), embedded, dropout_key)
    return gather_residual(x), terms


def embed_next(
    model: Model, parameters: Parameters, next_tokens: Int[Array, "batch seq"]
) -> Float[Array, "batch seq embed"]:
    """Return the embeddings of the next tokens, for head_inputs_ahead, without dropout."""
    return constrain_residual(merge(model, parameters).embedding(next_tokens))


def logits_of(
    model: Model, parameters: Parameters, hidden: Float[Array, "batch seq embed"], head: jax.Array
) -> Float[Array, "batch seq vocab"]:
    """Return the logits of the LM head's input and weights, both from head_inputs."""
    decoder = merge(model, parameters)
    # The gradient of a tied head is reduced with that of the lookups, not before.
    return decoder.logits(hidden, decoder.head_weights() if model.tie_word_embeddings else head)


def merge(model: Model, parameters: Parameters) -> Decoder:
    """Return the decoder with these parameters.

    Parameters that are missing in the tree stay abstract shapes and must not be used.
    `DeferredGradient` weights outside of the layers are completed here, those of the layers in the
    scan.
    """
    structure, shapes = _abstract(model)
    with_reductions = {
        name: tree if name in STACKS else attach_reductions(tree)
        for name, tree in parameters.items()
    }
    return nnx.merge(structure, nnx.State({**nnx.to_pure_dict(shapes), **with_reductions}))


@functools.cache  # needed nine times to trace a step, a fifth of the time in a small model
def _abstract(model: Model) -> tuple[nnx.GraphDef[Decoder], nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: Decoder(model, init.ParameterKeys(jax.random.key(0)))))


def _spec(path: tuple[Any, ...], parameter: nnx.Variable) -> ArraySpec:
    axes = parameter.get_metadata("axes")
    stacked = (path[0].key,) if path[0].key in STACKS else ()
    array = parameter.get_value()
    role = parameter.get_metadata().get("role", "parameter")
    return ArraySpec(array.shape, (*stacked, *axes), str(array.dtype), role)


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)
