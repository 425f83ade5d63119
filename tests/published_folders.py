"""Folders as transformers writes them, of the native decoder's random weights, without PyTorch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.config.schema import Model
from graphtrain.weights.families import family_of_model
from graphtrain.weights.families.family import array_shape, to_hugging_face
from graphtrain.weights.writer import SafetensorsWriter


def write_published(
    model: Model, folder: Path, changed: Mapping[str, tuple[Any, float]] | None = None
) -> None:
    """Write config.json and weights in float32.

    Args:
        model: Settings of the model.
        folder: Folder to create.
        changed: An index and the value there, by the name of a tensor.
    """
    random, family, tensors = np.random.default_rng(0), family_of_model(model), {}
    for row in family.weights(model):
        arrays = [random.random(array_shape(path, model), np.float32) for path in row.row.paths]
        tensors |= dict(to_hugging_face(row, arrays, model))
    for name, (index, value) in (changed or {}).items():
        tensors[name][index] = value
    writer = SafetensorsWriter(folder, {n: (t.dtype, t.shape) for n, t in tensors.items()})
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close()
    config = family.config_from_model(model) | {"torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
