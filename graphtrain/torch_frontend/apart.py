"""Whether positions of an imported model meet nowhere but in attention, as its programs may ask.

Documents kept apart and sequences split in a ring rest on that. A convolution over positions or a
state space does not know of them and would mix what is to stay apart, without a word.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from graphtrain.errors import ImportedModelError
from graphtrain.models.attention.segment_mask import isolate_documents
from graphtrain.torch_frontend.model import open_model
from graphtrain.torch_frontend.parity import (
    QUICKLY,
    once,
    real_module,
    stacked,
    weights,
    without_dropout,
)
from graphtrain.torch_frontend.shrink import shrunk
from lowering.trees import unflatten

if TYPE_CHECKING:
    from graphtrain.config.schema import Imported

_SIZES = (5, 11)  # tokens of two documents
_MOST = 1e-4  # that logits may differ, over the largest of them; float32


def ensure_apart(model: Imported, store: Path) -> None:
    """Check a model, unless the store holds that it has been.

    Raises:
        ImportedModelError: as check_apart.
    """
    once(model, store, "-apart", lambda: {"logits": check_apart(model)}, {"logits"})


def check_apart(model: Imported) -> float:
    """How far logits of two documents in one row are from those of each alone, relative.

    Raises:
        ImportedModelError: too far, or the module's attention is none that knows documents.
    """
    small, _ = shrunk(model)
    small = replace(small, dtype="float32")
    opened, module = open_model(small), real_module(small)
    without_dropout(opened.made.module)
    assert small.vocab is not None
    row = np.random.default_rng(0).integers(0, small.vocab, (1, sum(_SIZES)), np.int32)
    documents = np.repeat(np.arange(2, dtype=np.int32), _SIZES)[None]

    def both(arrays: dict[str, jax.Array], row: jax.Array) -> Any:
        with isolate_documents(jnp.asarray(documents)):
            packed, _ = opened.forward(unflatten(arrays), row, None)
        # What follows a document in its row is ahead of all its positions.
        each = jnp.concatenate([row, jnp.roll(row, -_SIZES[0], 1)])
        (first, second), _ = opened.forward(unflatten(arrays), each, None)
        return packed[0], jnp.concatenate([first[: _SIZES[0]], second[: _SIZES[1]]])

    arrays = stacked(opened, weights(module))
    together, alone = jax.device_get(jax.jit(both).lower(arrays, row).compile(QUICKLY)(arrays, row))
    off = float(np.abs(together - alone).max() / np.abs(alone).max())
    if not off <= _MOST:
        raise ImportedModelError(
            f"{type(module).__name__} lets documents of one row see each other elsewhere than in "
            f"attention, as by a convolution over positions (logits are off by {off:.1e}): leave "
            'out batch.documents = "apart" and the rules context'
        )
    return off
