"""Images of the batch that is being traced.

A step sets them once, with `with_images`. The model reads them where it embeds tokens, so that no
code in between passes them on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import jax

from lowering.tracing.context import set_context_variable

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import UInt8

_images: ContextVar[jax.Array | None] = ContextVar("images", default=None)


@contextmanager
def with_images(images: UInt8[Array, "batch images height width 3"] | None) -> Iterator[None]:
    """Give the code traced inside the images of its sequences; None: they have none."""
    with set_context_variable(_images, images):
        yield


def batch_images() -> UInt8[Array, "batch images height width 3"] | None:
    """Return the images of the sequences; None where they have none."""
    return _images.get()
