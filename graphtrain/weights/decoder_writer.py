"""Writing of a converted folder: the decoder's arrays, one row at a time, and model.toml."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from graphtrain.config.render import render_model
from graphtrain.config.schema import Model
from graphtrain.errors import WeightsError
from graphtrain.weights.conversion import Progress
from graphtrain.weights.digests import record_weights
from graphtrain.weights.families.family import LayerWeights, array_shape, to_decoder
from graphtrain.weights.files import WeightFiles
from graphtrain.weights.finite import read_finite
from graphtrain.weights.sources import stored_name
from graphtrain.weights.writer import SafetensorsWriter


def write_decoder(
    directory: Path,
    all_layer_weights: Sequence[LayerWeights],
    files: WeightFiles,
    model: Model,
    progress: Progress,
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Write a converted folder: the decoder's arrays, model.toml, and the digests of both.

    Args:
        directory: Folder to fill.
        all_layer_weights: Rows of weights, of every layer.
        files: Files of their tensors, which are read one row at a time.
        model: Settings of the model.
        progress: Called before each row.

    Returns:
        Dtype and shape of each array, by name.

    Raises:
        WeightsError: a tensor has elements that are NaN or infinite.
    """
    arrays = {
        stored_name(path, one.layer): (dtype_of(one, files), array_shape(path, model))
        for one in all_layer_weights
        for path in one.row.paths
    }
    writer = SafetensorsWriter(directory / "weights", arrays)
    for num_done, one in enumerate(all_layer_weights):
        progress(num_done, len(all_layer_weights))
        decoded = to_decoder(one, [read_finite(files, name) for name in one.names], model)
        for path, array in zip(one.row.paths, decoded, strict=True):
            writer.write(stored_name(path, one.layer), array)
    writer.close()
    (directory / "model.toml").write_text(render_model(model))
    record_weights(directory)
    return arrays


def dtype_of(layer_weights: LayerWeights, folder: WeightFiles) -> np.dtype:
    """Return the common dtype of the tensors of one row.

    Raises:
        WeightsError: they have different dtypes.
    """
    dtypes = {folder.dtype(name) for name in layer_weights.names}
    if len(dtypes) > 1:
        raise WeightsError(
            f"{layer_weights.names[0]} and the tensors stacked with it have the dtypes "
            f"{' and '.join(sorted(map(str, dtypes)))}; they form one array and must have one dtype"
        )
    return dtypes.pop()
