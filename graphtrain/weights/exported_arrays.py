"""Arrays as every export writes them: their dtypes, and their shapes without padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from graphtrain.config.schema import Model
from graphtrain.models.shapes import parameter_arrays
from graphtrain.weights.families.family import LayerWeights, array_shape, to_hugging_face
from graphtrain.weights.sources import WeightSource


def exported_dtype(
    path: str, weights: WeightSource, chosen: np.dtype | None, default: np.dtype
) -> np.dtype:
    """Return the dtype of an exported array.

    Buffers are float32, unless the initial weights have another dtype: transformers computes with
    the selection bias of a router in float32, and a rounded one would choose other experts.
    """
    stored = weights.dtype(path)
    if parameter_arrays(weights.model)[path].role == "buffer":
        return stored if stored and chosen is None else np.dtype("float32")
    return chosen or stored or default


def with_unpadded_vocab(model: Model, config: dict[str, Any] | None) -> Model:
    """Return the model without rows of the embedding that stand for no token.

    Its vocabulary size is that of config.json, if that is smaller.
    """
    tokens = model.vocab_tokens
    vocab = (config or {}).get("vocab_size") or tokens
    return replace(model, vocab=min(vocab, tokens), vocab_padding=None)


def remove_padding(path: str, array: np.ndarray, model: Model) -> np.ndarray:
    """Return the array without rows of vocabulary padding."""
    return array[tuple(slice(size) for size in array_shape(path, model))]


def tensor_shapes(
    layer_weights: LayerWeights, model: Model
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the tensors of one row, computed without allocating arrays."""
    empty = [
        np.broadcast_to(np.int8(0), array_shape(path, model)) for path in layer_weights.row.paths
    ]
    for name, tensor in to_hugging_face(layer_weights, empty, model):
        yield name, tensor.shape
