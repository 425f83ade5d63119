"""Documents that share a sequence: none sees another, and each begins at position 0.

A step says once which token is of which document; attention and positions ask here, so that nothing
between them carries it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from lowering.tracing.constrain import constrain
from lowering.tracing.context import scoped

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

_numbers: ContextVar[jax.Array | None] = ContextVar("documents", default=None)


@contextmanager
def apart(documents: Int[Array, "batch seq"] | None) -> Iterator[None]:
    """Keep documents apart in what is traced inside; None: all of a sequence is one document."""
    if documents is not None:
        documents = constrain(documents, "batch", None)  # integers: whole on each device
    with scoped(_numbers, documents):
        yield


def numbers() -> Int[Array, "batch seq"] | None:
    """Which document each token is of; None where they are not kept apart."""
    return _numbers.get()


def places() -> Int[Array, "batch seq"] | None:
    """The position of each token in its document, from 0; None where they are not kept apart."""
    found = numbers()
    if found is None:
        return None
    index = jnp.arange(found.shape[1])
    begins = jnp.concatenate([jnp.ones_like(found[:, :1], bool), found[:, 1:] != found[:, :-1]], 1)
    return index - jax.lax.cummax(jnp.where(begins, index, 0), 1)


def hide_others(
    scores: Float[Array, "batch kv_heads query group key"],
) -> Float[Array, "batch kv_heads query group key"]:
    """Scores with minus infinity where query and key are of different documents."""
    found = numbers()
    if found is None:
        return scores
    same = found[:, :, None] == found[:, None, :]
    return jnp.where(same[:, None, :, None, :], scores, -jnp.inf)
