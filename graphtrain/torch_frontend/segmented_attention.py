"""Attention of vision towers inside segments: images, or windows of them.

transformers' towers that take images of several sizes concatenate all of them, and give the ends of
the segments to flash attention. Here the sizes are known, so that segments are an axis.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torchax.tensor import Tensor
from transformers import AttentionInterface

from graphtrain.torch_frontend import private_torch

# transformers passes the ends of segments only to implementations with "flash" in their names.
IMPLEMENTATION = "graphtrain_flash_segments"


def register() -> None:
    """Register the implementation with transformers under the name in IMPLEMENTATION."""
    AttentionInterface.register(IMPLEMENTATION, _attention)


def _attention(
    module: torch.nn.Module,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: None,
    cu_seq_lens_q: torch.Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention inside segments.

    Args:
        module: that attends.
        query: (1, heads, tokens of all segments, head_dim).
        key: as query.
        value: as query.
        attention_mask: none.
        cu_seq_lens_q: ends of the segments; a tensor of PyTorch, not of a trace.
        scaling: of the products.
        kwargs: not read.
    """
    segments = Segments(np.diff(cu_seq_lens_q.numpy()).tolist())
    environment: Any = private_torch.environment_of(query)
    split = [Tensor(segments.split(x.jax()[0]), environment) for x in (query, key, value)]
    mask = segments.mask
    attn_out = environment.attend(
        *(*split, scaling),
        causal=False,
        mask=None if mask is None else Tensor(jnp.asarray(mask), environment),
    )
    joined = segments.join(attn_out.jax())
    return Tensor(joined.transpose(1, 0, 2)[None], environment), None


class Segments:
    """Segments whose lengths repeat: windows of images of one size.

    Args:
        lengths: number of tokens of each.
    """

    def __init__(self, lengths: list[int]) -> None:
        period = next(
            size
            for size in range(1, len(lengths) + 1)
            if len(lengths) % size == 0 and lengths == lengths[:size] * (len(lengths) // size)
        )
        self._repeats, self._lengths = len(lengths) // period, lengths[:period]
        self._width, self._tokens = max(self._lengths), sum(self._lengths)
        self._is_token = np.arange(self._width) < np.array(self._lengths)[:, None]

    @property
    def mask(self) -> np.ndarray | None:
        """Mask of the keys that are tokens, (segments, 1, 1, width); None if all are."""
        mask = np.tile(self._is_token, (self._repeats, 1))[:, None, None]
        return None if mask.all() else mask

    def split(self, x: jax.Array) -> jax.Array:
        """Split (heads, tokens, head_dim) into (segments, heads, width, head_dim), padded."""
        heads, _, head_dim = x.shape
        x = x.reshape(heads, self._repeats, self._tokens, head_dim)
        if not self._is_token.all():
            starts = np.cumsum([0, *self._lengths[:-1]])
            index = starts[:, None] + np.arange(self._width)
            x = jnp.take(x, np.where(self._is_token, index, 0).ravel(), axis=2)
        x = x.reshape(heads, self._repeats * len(self._lengths), self._width, head_dim)
        return x.transpose(1, 0, 2, 3)

    def join(self, x: jax.Array) -> jax.Array:
        """Return (heads, tokens, head_dim) from what `split` returned, without the padding."""
        _, heads, _, head_dim = x.shape
        x = x.transpose(1, 0, 2, 3).reshape(heads, self._repeats, -1, head_dim)
        if not self._is_token.all():
            x = jnp.take(x, np.flatnonzero(self._is_token.ravel()), axis=2)
        return x.reshape(heads, -1, head_dim)
