"""Positions in time, height and width of tokens in a sequence with images (mRoPE)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from graphtrain.config.hf_images import ImageLayout

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Int


def image_positions(
    tokens: Int[Array, "batch seq"],
    layout: ImageLayout,
    documents: Int[Array, "batch seq"] | None = None,
) -> Int[Array, "3 batch seq"]:
    """Return the positions of tokens as Qwen2-VL counts them.

    A text token is one position after the token before it. The placeholders of an image have the
    row and the column of their feature, and the text after an image begins after its longer side.

    Args:
        tokens: token ids.
        layout: of the images.
        documents: segment ids; positions restart at 0 in each. None: each row is one document.

    Source: Wang et al. 2024, "Qwen2-VL", section 2.1, https://arxiv.org/abs/2409.12191
    """
    (_, columns), longest = layout.grid, max(layout.grid)
    is_image = tokens == layout.token
    placeholders = jnp.cumsum(is_image, 1) - is_image  # before each token
    text = jnp.cumsum(~is_image, 1) - ~is_image
    begin = text + placeholders // layout.tokens * longest
    feature = jnp.where(is_image, placeholders % layout.tokens, 0)
    # Those of an image are counted from where it begins.
    offsets = jnp.stack([jnp.zeros_like(feature), feature // columns, feature % columns])
    if documents is not None:
        is_start = jnp.concatenate(
            [jnp.ones_like(is_image[:, :1]), documents[:, 1:] != documents[:, :-1]], 1
        )
        begin = begin - jax.lax.cummax(jnp.where(is_start, begin, 0), 1)
    return begin + offsets
