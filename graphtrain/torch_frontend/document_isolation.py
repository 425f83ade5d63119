"""Check that an imported model mixes positions only in attention.

Isolated documents and context parallelism depend on it. A convolution over positions or a state
space model would silently mix documents.
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
from graphtrain.torch_frontend.open_module import open_model
from graphtrain.torch_frontend.parity import (
    UNOPTIMIZED,
    disable_dropout,
    module_with_weights,
    run_check_once,
    stack_weights,
    weights,
)
from graphtrain.torch_frontend.shrink import shrink_model
from lowering.trees import unflatten

if TYPE_CHECKING:
    from graphtrain.config.schema import TorchModel

_DOCUMENT_LENGTHS = (5, 11)  # lengths of two documents, in tokens
_TOLERANCE = 1e-4  # tolerance of logits in float32, relative to the largest


def ensure_documents_isolated(model: TorchModel, store: Path) -> None:
    """Run check_documents_isolated, unless the store has a record of it for this model.

    Raises:
        ImportedModelError: as check_documents_isolated.
    """
    run_check_once(
        model, store, "-apart", lambda: {"logits": check_documents_isolated(model)}, {"logits"}
    )


def check_documents_isolated(model: TorchModel) -> float:
    """Compare logits of two documents packed in one row with those of each document alone.

    Returns:
        The largest difference, relative to the largest logit.

    Raises:
        ImportedModelError: they differ, or the module's attention cannot isolate documents.
    """
    small, _ = shrink_model(model)
    small = replace(small, dtype="float32")
    opened, module = open_model(small), module_with_weights(small)
    disable_dropout(opened.meta.module)
    assert small.vocab is not None
    row = np.random.default_rng(0).integers(0, small.vocab, (1, sum(_DOCUMENT_LENGTHS)), np.int32)
    documents = np.repeat(np.arange(2, dtype=np.int32), _DOCUMENT_LENGTHS)[None]

    def packed_and_separate(arrays: dict[str, jax.Array], row: jax.Array) -> Any:
        with isolate_documents(jnp.asarray(documents)):
            packed, _ = opened.forward(unflatten(arrays), row, None)
        # Tokens after a document do not affect it: attention is causal.
        shifted_rows = jnp.concatenate([row, jnp.roll(row, -_DOCUMENT_LENGTHS[0], 1)])
        (first, second), _ = opened.forward(unflatten(arrays), shifted_rows, None)
        return packed[0], jnp.concatenate(
            [first[: _DOCUMENT_LENGTHS[0]], second[: _DOCUMENT_LENGTHS[1]]]
        )

    arrays = stack_weights(opened, weights(module))
    packed_logits, separate_logits = jax.device_get(
        jax.jit(packed_and_separate).lower(arrays, row).compile(UNOPTIMIZED)(arrays, row)
    )
    difference = float(
        np.abs(packed_logits - separate_logits).max() / np.abs(separate_logits).max()
    )
    if not difference <= _TOLERANCE:
        raise ImportedModelError(
            f"{type(module).__name__} mixes positions outside of attention, for example by a "
            "convolution, so documents of one row affect each other (logits differ by "
            f"{difference:.1e}): remove batch.cross_document_attention = false and the rules "
            "context"
        )
    return difference
