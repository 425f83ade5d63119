"""Causal self-attention."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from graphtrain.config.schema import Model
from graphtrain.models import weights
from graphtrain.models.dot import dot
from graphtrain.models.order import positions
from graphtrain.models.positions import alibi_slopes, rotate
from graphtrain.models.projection import project, projects
from graphtrain.models.ring import ring_attention
from lowering.constrain import constrain, size_of, split_of

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float


class Attention(nnx.Module):
    """Projections to query, key and value, attention, and the projection back."""

    def __init__(self, model: Model, rngs: nnx.Rngs):
        self.model = model
        self.query = weights.normal(model, rngs, "embed", "heads", "head_dim")
        self.key = weights.normal(model, rngs, "embed", "kv_heads", "head_dim")
        self.value = weights.normal(model, rngs, "embed", "kv_heads", "head_dim")
        self.output = weights.normal(
            model, rngs, "heads", "head_dim", "embed", scale=(2 * model.layers) ** -0.5
        )
        if model.bias != "none":
            self.query_bias = weights.zeros(model, "heads", "head_dim")
            self.key_bias = weights.zeros(model, "kv_heads", "head_dim")
            self.value_bias = weights.zeros(model, "kv_heads", "head_dim")
        if model.bias == "all":
            self.output_bias = weights.zeros(model, "embed")

    @jax.named_scope("attention")
    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        query, key, value = projects(self, ("query", "key", "value"), "bse,ehd->bshd", x)
        query = constrain(query, "batch", "seq", "heads", "head_dim")
        key = constrain(key, "batch", "seq", "kv_heads", "head_dim")
        value = constrain(value, "batch", "seq", "kv_heads", "head_dim")
        if self.model.positions == "rope":
            places = positions(query.shape[1])
            query = rotate(query, places, self.model.rope_base)
            key = rotate(key, places, self.model.rope_base)
        query = constrain(query, "batch", "attending", "attention_heads", "head_dim")
        key, value = _enough(key, value)
        key = constrain(key, "batch", "attended", "attention_kv_heads", "head_dim")
        value = constrain(value, "batch", "attended", "attention_kv_heads", "head_dim")
        mixed = self._attend(query, key, value)
        mixed = constrain(mixed, "batch", "attending", "attention_heads", "head_dim")
        mixed = constrain(mixed, "batch", "seq", "heads", "head_dim")
        return project(self, "output", "bshd,hde->bse", mixed)

    def _attend(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        """As a ring where the rules split keys by position, else each device by itself."""
        slopes = alibi_slopes(self.model.heads) if self.model.positions == "alibi" else None
        if ring := split_of("attended"):
            return ring_attention(query, key, value, slopes and tuple(slopes), ring)
        attend = partial(attention, slopes=slopes)
        if self.model.remat == "attention":  # the scores, the largest array of all, are not kept
            attend = jax.checkpoint(attend, prevent_cse=False)
        return attend(query, key, value)


def _enough(key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Repeat key and value heads as often as it takes for each device to have one."""
    heads, devices = key.shape[2], size_of("attention_kv_heads")
    times = devices // math.gcd(heads, devices)
    return (key, value) if times == 1 else (jnp.repeat(key, times, 2), jnp.repeat(value, times, 2))


def attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    slopes: list[float] | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Causal attention in which groups of query heads share one key and value head.

    Scores and softmax are float32 whatever the dtype of the inputs. Slopes, one per query head,
    lower a score by the distance (ALiBi).

    Source: Ainslie et al. 2023, "GQA", section 2.2, https://arxiv.org/abs/2305.13245
    """
    batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)

    # h: key head, g: query head of its group, q and k: positions. "hqgk" is the order the product
    # comes in; any other would transpose the largest array of the model.
    scores = dot("bqhgd,bkhd->bhqgk", grouped, key, jnp.float32) * head_dim**-0.5
    positions = jnp.arange(length)
    distance = positions[:, None, None] - positions  # (q, 1, k)
    if slopes is not None:
        by_head = jnp.array(slopes, jnp.float32).reshape(kv_heads, 1, -1, 1)
        scores = scores - by_head * distance
    scores = jnp.where(distance >= 0, scores, -jnp.inf)
    shares = jax.nn.softmax(scores, axis=-1)
    mixed = dot("bhqgk,bkhd->bqhgd", shares, value)
    return mixed.reshape(query.shape)
