"""Arrays that a vision tower reads, from the pixels of images: normalized values, or patches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from graphtrain.config.hf_images import Normalization

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, UInt8


def normalized_pixels(
    images: UInt8[Array, "rows images height width 3"], normalization: Normalization
) -> Float[Array, "all_images 3 height width"]:
    """Return float32 values as transformers' image processors compute them after resizing."""
    values = images.reshape(-1, *images.shape[2:]).astype(jnp.float32)
    values = values * jnp.float32(normalization.rescale_factor)
    mean, std = (jnp.asarray(x, jnp.float32) for x in (normalization.mean, normalization.std))
    return ((values - mean) / std).transpose(0, 3, 1, 2)


def cut_into_patches(
    pixels: Float[Array, "all_images 3 height width"], patch: int, merge: int, frames: int
) -> Float[Array, "patches values"]:
    """Return the patches of images in the order of Qwen2-VL: those that are merged stand together.

    Args:
        pixels: normalized images.
        patch: height and width of a patch in pixels.
        merge: height and width, in patches, of a square that the tower merges.
        frames: frames of a patch; an image is repeated.

    Source: Qwen2VLImageProcessor, https://github.com/huggingface/transformers
    """
    count, channels, height, width = pixels.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    split = pixels.reshape(count, channels, rows, merge, patch, columns, merge, patch)
    ordered = split.transpose(0, 2, 5, 3, 6, 1, 4, 7)
    patches = ordered.reshape(-1, channels, 1, patch, patch)
    return jnp.repeat(patches, frames, axis=2).reshape(len(patches), -1)
