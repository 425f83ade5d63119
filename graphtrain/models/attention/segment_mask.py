"""Isolation of packed documents: no cross-document attention, and positions that restart at 0.

A step sets the segment ids once, with `isolate_documents`. Attention and position encodings read
them from this context, so that no code in between passes them on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from lowering.tracing.constrain import constrain
from lowering.tracing.context import set_context_variable

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int


class Masks(NamedTuple):
    """Masks in addition to the causal mask."""

    window: jax.Array | None  # sliding window in positions, a scalar
    documents: jax.Array | None  # segment ids (batch, seq), in the order of the sequence


_segment_ids: ContextVar[jax.Array | None] = ContextVar("documents", default=None)


@contextmanager
def isolate_documents(documents: Int[Array, "batch seq"] | None) -> Iterator[None]:
    """Isolate documents in the code traced inside.

    Args:
        documents: Segment ids in the order of the sequence, also where a ring reorders positions;
            None: each sequence is one document.
    """
    if documents is not None:
        documents = constrain(documents, "batch", None)  # small: replicated along positions
    with set_context_variable(_segment_ids, documents):
        yield


def segment_ids() -> Int[Array, "batch seq"] | None:
    """Return the segment ids; None where documents are not isolated."""
    return _segment_ids.get()


def segment_positions() -> Int[Array, "batch seq"] | None:
    """Return each token's position in its document; None where documents are not isolated.

    They are in the order of the sequence: `ring_order.document_positions` is in that of a ring.
    """
    ids = segment_ids()
    if ids is None:
        return None
    index = jnp.arange(ids.shape[1])
    is_start = jnp.concatenate([jnp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], 1)
    return index - jax.lax.cummax(jnp.where(is_start, index, 0), 1)


def mask_other_segments(
    scores: Float[Array, "batch kv_heads query group key"],
) -> Float[Array, "batch kv_heads query group key"]:
    """Set scores to minus infinity where query and key belong to different documents."""
    ids = segment_ids()
    if ids is None:
        return scores
    return mask_pairs(scores, ids, ids)


def mask_pairs(
    scores: Float[Array, "batch kv_heads query group key"],
    of_queries: Int[Array, "batch query"],
    of_keys: Int[Array, "batch key"],
) -> Float[Array, "batch kv_heads query group key"]:
    """Set scores to minus infinity where the segment ids of query and key differ."""
    is_same = of_queries[:, :, None] == of_keys[:, None, :]
    return jnp.where(is_same[:, None, :, None, :], scores, -jnp.inf)
