"""Multi-head latent attention (MLA): keys and values are products of one narrow latent.

The latent of all keys and values of a token, and the rotated part of its keys, are one vector for
all heads. While sequences are trained, keys and values are computed from it. With a KV cache, which
holds nothing else, queries are multiplied by the weights of the keys instead, so that all heads
attend to the latents as to one head of keys and values; the weights of the values multiply the
result.

Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1, https://arxiv.org/abs/2405.04434
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from graphtrain.config.schema import Model
from graphtrain.models import init
from graphtrain.models.attention.cached import attend_to_cache
from graphtrain.models.attention.kv_cache import LayerCache, context_length, layer_cache
from graphtrain.models.attention.module import attend
from graphtrain.models.attention.positions import frequencies, rotate
from graphtrain.models.attention.ring_order import positions
from graphtrain.models.attention.score_mods import ScoreTransform
from graphtrain.models.matmul import dot
from graphtrain.models.norms import Norm
from graphtrain.models.projection import project
from lowering.tracing.constrain import constrain
from lowering.tracing.recording import record

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float


class LatentAttention(nnx.Module):
    """Latents, projections of queries, keys and values from them, attention, output projection."""

    def __init__(self, model: Model, keys: init.ParameterKeys):
        assert model.latent_attention is not None
        self.model, self.latent = model, model.latent_attention
        if self.latent.q_lora_rank is None:
            self.query = init.normal(model, keys, "embed", "heads", "head_dim")
        else:
            self.query_down = init.normal(model, keys, "embed", "q_latent")
            self.query_norm = Norm(model, "q_latent")
            self.query_up = init.normal(model, keys, "q_lora", "heads", "head_dim")
        self.kv_down = init.normal(model, keys, "embed", "kv_latent")
        self.key_rope = init.normal(model, keys, "embed", "rope_head_dim")
        self.kv_norm = Norm(model, "kv_latent")
        self.key_up = init.normal(model, keys, "kv_lora", "heads", "nope_head_dim")
        self.value_up = init.normal(model, keys, "kv_lora", "heads", "v_head_dim")
        self.output = init.normal(
            model, keys, "heads", "v_head_dim", "embed", scale=(2 * model.depth) ** -0.5
        )
        if model.attention_sinks:
            self.sinks = init.zeros(model, "heads")

    @jax.named_scope("attention")
    def __call__(
        self, x: Float[Array, "batch seq embed"], full: bool | jax.Array | None = None
    ) -> Float[Array, "batch seq embed"]:
        """Return the output projection of attention over x, the normed residual stream.

        `full` is that of `Attention`; there are no sliding windows here.
        """
        query = record("attention/query", self._query(x), "batch", "seq", "heads", "head_dim")
        latent = self.kv_norm(project(self, "kv_down", "bse,el->bsl", x))
        latent = record("attention/kv_latent", latent, "batch", "seq", None)
        shared_key = project(self, "key_rope", "bse,ed->bsd", x)[:, :, None]
        position_ids = positions(x.shape[1])
        angles = frequencies(self.model, context_length() or x.shape[1], full)
        query, shared_key = (rotate(each, position_ids, *angles) for each in (query, shared_key))
        if isinstance(cache := layer_cache(), LayerCache):
            output = self._attend_to_latents(cache, query, shared_key, latent)
        else:
            output = self._attend(query, shared_key, latent)
        output = record("attention/context", output, "batch", "seq", "heads", "v_head_dim")
        return project(self, "output", "bshd,hde->bse", output)

    def _query(self, x: jax.Array) -> Float[Array, "batch seq heads head_dim"]:
        if self.latent.q_lora_rank is None:
            return project(self, "query", "bse,ehd->bshd", x)
        latent = self.query_norm(project(self, "query_down", "bse,el->bsl", x))
        return project(self, "query_up", "bsl,lhd->bshd", latent)

    def _attend(
        self,
        query: Float[Array, "batch seq heads head_dim"],
        shared_key: Float[Array, "batch seq 1 rope_head_dim"],
        latent: Float[Array, "batch seq kv_lora"],
    ) -> Float[Array, "batch seq heads v_head_dim"]:
        """Return attention to keys and values that are computed from the latents."""
        own_key = project(self, "key_up", "bsl,lhd->bshd", latent)
        value = project(self, "value_up", "bsl,lhd->bshd", latent)
        shared_key = jnp.broadcast_to(shared_key, (*own_key.shape[:3], shared_key.shape[3]))
        key = jnp.concatenate([shared_key, own_key], -1)
        key = record("attention/key", key, "batch", "seq", "kv_heads", "head_dim")
        value = record("attention/value", value, "batch", "seq", "kv_heads", "v_head_dim")
        model = self.model
        how = model.remat, model.unroll, model.attention
        return attend(query, key, value, ScoreTransform.of(model), None, *how, sinks=self._sinks())

    def _attend_to_latents(
        self,
        cache: LayerCache,
        query: Float[Array, "batch seq heads head_dim"],
        shared_key: Float[Array, "batch seq 1 rope_head_dim"],
        latent: Float[Array, "batch seq kv_lora"],
    ) -> Float[Array, "batch seq heads v_head_dim"]:
        """Add the latents of new tokens to a layer's KV cache; return attention to all latents."""
        rotated, own = query[..., : self.model.rotary_dim], query[..., self.model.rotary_dim :]
        absorbed = dot("bshd,lhd->bshl", own, self.key_up[...])
        query = constrain(jnp.concatenate([rotated, absorbed], -1), "batch", "seq", "heads", None)
        value = latent[:, :, None]
        key = jnp.concatenate([shared_key, value], -1)
        scoring, how = ScoreTransform.of(self.model), self.model.attention
        mixed = attend_to_cache(cache, query, key, value, scoring, None, how, self._sinks())
        return dot("bshl,lhd->bshd", mixed, self.value_up[...])

    def _sinks(self) -> jax.Array | None:
        return self.sinks[...] if self.model.attention_sinks else None
