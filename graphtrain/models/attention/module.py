"""Causal self-attention: projections, and the choice of an attention implementation."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from graphtrain.config.schema import AttentionImplementation, Model
from graphtrain.models import init
from graphtrain.models.attention.blockwise import blockwise_attention
from graphtrain.models.attention.cached import attend_to_cache
from graphtrain.models.attention.dot_product import dot_product_attention
from graphtrain.models.attention.flash import flash_attention
from graphtrain.models.attention.kernel_support import AttentionSpec, uses_flash_kernel
from graphtrain.models.attention.kv_cache import LayerCache, context_length, layer_cache
from graphtrain.models.attention.operator_region import fused_attention, uses_fused_operator
from graphtrain.models.attention.positions import frequencies, rotate
from graphtrain.models.attention.ring import ring_attention
from graphtrain.models.attention.ring_order import positions, ring_axes
from graphtrain.models.attention.score_mods import ScoreTransform
from graphtrain.models.normed_projection import project_normed
from graphtrain.models.norms import Norm
from graphtrain.models.projection import project, project_many
from lowering.tracing.constrain import constrain, mesh_axes_of, shards_of
from lowering.tracing.cpu_hints import on_cpu
from lowering.tracing.current_target import traced_target
from lowering.tracing.recording import record

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float


class Attention(nnx.Module):
    """Query, key and value projections, attention, and output projection."""

    def __init__(self, model: Model, keys: init.ParameterKeys):
        self.model = model
        self.query = init.normal(model, keys, "embed", "heads", "head_dim")
        self.key = init.normal(model, keys, "embed", "kv_heads", "head_dim")
        self.value = init.normal(model, keys, "embed", "kv_heads", "head_dim")
        self.output = init.normal(
            model, keys, "heads", "head_dim", "embed", scale=(2 * model.depth) ** -0.5
        )
        if model.bias != "none":
            self.query_bias = init.zeros(model, "heads", "head_dim")
            self.key_bias = init.zeros(model, "kv_heads", "head_dim")
            self.value_bias = init.zeros(model, "kv_heads", "head_dim")
        if model.bias in ("attention", "all"):
            self.output_bias = init.zeros(model, "embed")
        if model.attention_sinks:
            self.sinks = init.zeros(model, "heads")
        if model.qk_norm:
            self.query_norm, self.key_norm = Norm(model, "head_dim"), Norm(model, "head_dim")

    @jax.named_scope("attention")
    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        full: bool | jax.Array | None = None,
        norm: nnx.Module | None = None,
    ) -> Float[Array, "batch seq embed"]:
        """Return the output projection of attention over x.

        Args:
            x: Normed residual stream.
            full: Whether this layer has global attention although the model has a sliding window;
                without it, the model's window applies. An array in a scan over layers.
            norm: Normalization of x, if x is not normed, or not gathered either; the backward pass
                computes it again.
        """
        query, key, value = self._project(x, norm)
        query = record("attention/query", query, "batch", "seq", "heads", "head_dim")
        key = record("attention/key", key, "batch", "seq", "kv_heads", "head_dim")
        value = record("attention/value", value, "batch", "seq", "kv_heads", "head_dim")
        if self.model.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.model.positions == "rope":
            position_ids = positions(x.shape[1])
            rope_frequencies, factor = frequencies(self.model, context_length() or x.shape[1], full)
            rotate_both = partial(rotate, factor=factor)
            # Computed again, as the norm: sines and cosines would wait beside the MLP's arrays.
            if norm is not None:
                rotate_both = jax.checkpoint(rotate_both)
            query, key = (rotate_both(of, position_ids, rope_frequencies) for of in (query, key))
            query = record("attention/rotated_query", query, "batch", "seq", "heads", "head_dim")
            key = record("attention/rotated_key", key, "batch", "seq", "kv_heads", "head_dim")
        model = self.model
        scoring, window = ScoreTransform.of(model), self._window(full)
        sinks = self.sinks[...] if model.attention_sinks else None
        if isinstance(cache := layer_cache(), LayerCache):
            output = attend_to_cache(
                cache, query, key, value, scoring, window, model.attention, sinks
            )
        else:
            how = model.remat, model.unroll, model.attention
            output = attend(query, key, value, scoring, window, *how, sinks)
        output = record("attention/context", output, "batch", "seq", "heads", "head_dim")
        return project(self, "output", "bshd,hde->bse", output)

    def _project(self, x: jax.Array, norm: nnx.Module | None) -> list[jax.Array]:
        """Return queries, keys and values."""
        names, equation = ("query", "key", "value"), "bse,ehd->bshd"
        if norm is None:
            return project_many(self, names, equation, x)
        return project_normed(self, names, equation, norm, x)

    def _window(self, full: bool | jax.Array | None) -> int | jax.Array | None:
        """Return the sliding window in positions, or None; an array where `full` is one."""
        if self.model.sliding_window is None or full is None:
            return self.model.sliding_window
        if isinstance(full, bool):
            return None if full else self.model.sliding_window
        return jnp.where(full, jnp.iinfo(jnp.int32).max, jnp.int32(self.model.sliding_window))


def attend(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch kv_seq kv_heads head_dim"],
    value: Float[Array, "batch kv_seq kv_heads value_dim"],
    transform: ScoreTransform,
    window: int | jax.Array | None = None,
    remat: str = "none",
    unroll: int = 1,
    implementation: AttentionImplementation = "auto",
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch seq heads value_dim"]:
    """Compute causal attention by the implementation that the rules and the target determine.

    Inputs and output are sharded as the projections are.

    Args:
        query: Queries, with rotary embedding applied.
        key: Keys, with rotary embedding applied.
        value: Values.
        transform: Transformation of query-key products into scores.
        window: Sliding window in positions; without it, a query sees all earlier keys.
        remat: With "attention" the backward pass recomputes the scores.
        unroll: Number of layers unrolled in each iteration of the scan over layers.
        implementation: "flash" requires the target's kernel, "auto" uses it where there is one,
            "dense" never does.
        sinks: Logit of each query head's attention sink; without them, there are none.

    Raises:
        LoweringError: the kernel is required and there is none; the message has the reason.
    """
    arrays = (
        _to_attention_sharding(query, QUERY_AXES),
        _to_attention_sharding(key, KEY_AXES),
        _to_attention_sharding(value, KEY_AXES),
    )
    narrow_values = value.shape[3] != query.shape[3]
    use_operator = sinks is None and not narrow_values and uses_fused_operator(transform)
    target = None if use_operator else traced_target()
    spec = replace(_spec(arrays[0], transform, window, sinks), narrow_values=narrow_values)
    if target and uses_flash_kernel(implementation, spec, target):
        static_window = None if window is None else int(window)
        return _to_projection_sharding(
            flash_attention(*arrays, transform, target.platform, static_window), QUERY_AXES
        )
    traced_window = None if window is None else jnp.asarray(window, jnp.int32)
    split_sinks = None if sinks is None else _sinks_to_attention_sharding(sinks)
    return _to_projection_sharding(
        _without_kernel(*arrays, transform, traced_window, remat, unroll, split_sinks), QUERY_AXES
    )


def _spec(
    query: jax.Array,
    scoring: ScoreTransform,
    window: int | jax.Array | None,
    sinks: jax.Array | None,
) -> AttentionSpec:
    return AttentionSpec(
        dtype=query.dtype.name,
        length=query.shape[1],
        head_dim=query.shape[-1],
        window=window is not None,
        window_varies_by_layer=isinstance(window, jax.Array),
        soft_cap=scoring.cap is not None,
        alibi=scoring.slopes is not None,
        sinks=sinks is not None,
        sharded_positions=bool(mesh_axes_of("q_seq") or ring_axes()),
        per_replica=bool(jax.typeof(query).mat.varying),
    )


def _without_kernel(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scoring: ScoreTransform,
    window: jax.Array | None,
    remat: str,
    unroll: int,
    sinks: jax.Array | None,
) -> jax.Array:
    """Compute attention without a kernel: by a ring, a fused region, CPU blocks, or all scores."""
    if ring := ring_axes():
        return ring_attention(query, key, value, scoring, ring, window, sinks)
    same_width = value.shape[3] == query.shape[3]
    if sinks is None and same_width and uses_fused_operator(scoring):
        return fused_attention(query, key, value, scoring, window)
    if on_cpu():
        return blockwise_attention(query, key, value, scoring, window, sinks)
    dense_attention = partial(dot_product_attention, scoring=scoring)
    if remat == "attention":  # recompute the scores, the largest array
        dense_attention = jax.checkpoint(dense_attention, prevent_cse=unroll > 1)
    return dense_attention(query, key, value, window=window, sinks=sinks)


# Array axes inside attention: positions, heads, and the heads within one shard of the heads axis.
# Ulysses (all-to-all of positions for heads) shards the last and moves nothing along the second.
QUERY_AXES = ("q_seq", "heads", "attention_heads")
KEY_AXES = ("kv_seq", "kv_heads", "attention_kv_heads")


def _to_attention_sharding(
    x: Float[Array, "batch seq heads head_dim"], axes: tuple[str, str, str]
) -> Float[Array, "batch seq repeated head_dim"]:
    """Reshard x from the projections' sharding to attention's; any communication is here.

    Key and value heads are repeated until there is one for each device.
    """
    positions, heads, attention_axis = axes
    x = _split_heads_by_shard(constrain(x, "batch", "seq", heads, "head_dim"), heads)
    devices = shards_of(attention_axis)
    if axes == KEY_AXES and (times := devices // math.gcd(x.shape[3], devices)) > 1:
        x = jnp.repeat(x, times, 3)
    x = constrain(x, "batch", "seq", heads, None, "head_dim")
    x = constrain(x, "batch", positions, heads, attention_axis, "head_dim")
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _sinks_to_attention_sharding(sinks: Float[Array, " heads"]) -> Float[Array, " heads"]:
    """Reshard sinks as _to_attention_sharding does the query heads."""
    split = constrain(sinks.reshape(shards_of("heads"), -1), "heads", None)
    return constrain(split, "heads", "attention_heads").reshape(-1)


def _to_projection_sharding(
    x: Float[Array, "batch seq heads head_dim"], axes: tuple[str, str, str]
) -> Float[Array, "batch seq heads head_dim"]:
    """Reshard x from attention's sharding to that of the projections."""
    positions, heads, attention_axis = axes
    split = constrain(
        _split_heads_by_shard(x, heads), "batch", positions, heads, attention_axis, "head_dim"
    )
    return constrain(split, "batch", "seq", heads, None, "head_dim").reshape(x.shape)


def _split_heads_by_shard(x: jax.Array, heads: str) -> jax.Array:
    """Split the heads dimension in two: shards of the heads axis, and heads within a shard."""
    return x.reshape(*x.shape[:2], shards_of(heads), -1, x.shape[-1])
