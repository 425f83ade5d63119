"""Export of the decoder's weights to checkpoints that Megatron-LM loads."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from graphtrain.checkpoints.output_directory import create_directory
from graphtrain.config.schema import Model
from graphtrain.errors import WeightsError
from graphtrain.weights.conversion import ConversionSummary, Progress, summarize
from graphtrain.weights.exported_arrays import exported_dtype, remove_padding, with_unpadded_vocab
from graphtrain.weights.families.family import LayerWeights, array_shape, to_hugging_face
from graphtrain.weights.files import numpy_dtype_of
from graphtrain.weights.finite import ExportedValues
from graphtrain.weights.hf_files import read_config
from graphtrain.weights.imported_run import run_of_imported_model
from graphtrain.weights.megatron.layout import RankLayout
from graphtrain.weights.megatron.rank_writer import Naming, write_rank_folders
from graphtrain.weights.megatron.rows import megatron_family
from graphtrain.weights.megatron.torch_dist_writer import write_torch_dist
from graphtrain.weights.megatron.written_arguments import arguments_of_model
from graphtrain.weights.open import open_weights
from graphtrain.weights.sources import WeightSource

Format = Literal["torch-dist", "ranks"]
_RELEASE = "release"  # Megatron-LM loads neither optimizer state nor an iteration from such a one


@dataclass(frozen=True)
class MegatronForm:
    """Form of a written checkpoint."""

    format: Format = "torch-dist"
    layout: RankLayout = field(default_factory=RankLayout)
    naming: Naming = "local"  # layers whose names rank folders have
    vocab_multiple: int = 128  # --make-vocab-size-divisible-by of Megatron-LM
    dtype: str | None = None  # None: as of the initial weights, or float32


class MegatronTensors:
    """Tensors of a model in Megatron's form, which are read when they are written.

    Args:
        weights: Source of the decoder's arrays.
        model: Settings of the model without padding of the vocabulary.
        padded_vocab: Rows of the embedding that is written.
        dtype: Dtype of the tensors; None: as of the source, or float32.
    """

    def __init__(
        self, weights: WeightSource, model: Model, padded_vocab: int, dtype: np.dtype | None
    ) -> None:
        self._weights, self._dtype = weights, dtype
        self.values = ExportedValues()
        self.model, self.padded = model, replace(model, vocab=padded_vocab)
        self.family = megatron_family(model)
        self.groups = list(self.family.weights(model))

    def dtype(self, group: LayerWeights) -> np.dtype:
        """Return the dtype of the tensors of a group."""
        default = np.dtype(np.float32)
        return exported_dtype(group.row.paths[0], self._weights, self._dtype, default)

    def shape(self, group: LayerWeights) -> tuple[int, ...]:
        """Return the shape of each tensor of a group."""
        empty = [np.broadcast_to(np.int8(0), array_shape(p, self.padded)) for p in group.row.paths]
        _, tensor = next(to_hugging_face(group, empty, self.padded))
        return tensor.shape

    def read(self, group: LayerWeights) -> Iterator[tuple[str, np.ndarray]]:
        """Yield names and tensors of a group: one, or one for each expert."""
        stored = self._weights.read(group.row.paths, group.layer)
        arrays = [
            self._padded(path, remove_padding(path, array, self.model))
            for path, array in zip(group.row.paths, stored, strict=True)
        ]
        for name, tensor in to_hugging_face(group, arrays, self.padded):
            yield name, self.values.cast(name, tensor, self.dtype(group))

    def _padded(self, path: str, array: np.ndarray) -> np.ndarray:
        shape = array_shape(path, self.padded)
        if array.shape == shape:
            return array
        return np.pad(array, [(0, new - old) for new, old in zip(shape, array.shape, strict=True)])


def to_megatron(
    source: Path,
    destination: Path,
    progress: Progress,
    form: MegatronForm,
    step: int | None = None,
    *,
    averaged: bool = False,
) -> ConversionSummary:
    """Convert a converted folder or a run into a checkpoint of Megatron-LM, without optimizer.

    The vocabulary is padded with rows of zeros, as Megatron-LM pads it for these tensor ranks.

    Args:
        source: Converted folder, or directory of a run.
        destination: Folder to create; Megatron-LM's --load.
        progress: Called for each group of arrays.
        form: Format, ranks and dtype.
        step: Step of the run's checkpoint; None for the last.
        averaged: Whether to write the moving average of the run's weights.

    Raises:
        WeightsError: Megatron-LM has no such model, or the ranks cannot divide it.
        MissingExtra: PyTorch is not installed.
    """
    if run_of_imported_model(source) is not None:
        raise WeightsError(
            f"{source} is a run of a PyTorch model, which has the names of its own module; export "
            "it to Hugging Face, convert that with hf-to-graphtrain, and export the result"
        )
    weights = open_weights(source, step, averaged=averaged)
    side = weights.side / "config.json"
    config = read_config(weights.side) if side.is_file() else None
    model = with_unpadded_vocab(weights.model, config)
    form.layout.check(model)
    multiple = form.vocab_multiple * form.layout.tensor
    padded_vocab = math.ceil(model.vocab / multiple) * multiple
    arguments = arguments_of_model(model, padded_vocab, form.layout)
    dtype = None if form.dtype is None else numpy_dtype_of("--dtype", form.dtype)
    tensors = MegatronTensors(weights, model, padded_vocab, dtype)
    common = {"args": Namespace(**arguments), "checkpoint_version": 3.0, "iteration": 0}
    with create_directory(destination) as directory:
        _write(directory / _RELEASE, tensors, common, form, progress)
        (directory / "latest_checkpointed_iteration.txt").write_text(_RELEASE)
        (directory / "arguments.json").write_text(json.dumps(arguments, indent=2) + "\n")
    tensors.values.report(source)
    progress(len(tensors.groups), len(tensors.groups))
    arrays = {
        name: (tensors.dtype(group), tensors.shape(group))
        for group in tensors.groups
        for name in group.names
    }
    return summarize(tensors.family, model, arrays)


def _write(
    directory: Path,
    tensors: MegatronTensors,
    common: dict[str, Any],
    form: MegatronForm,
    progress: Progress,
) -> None:
    directory.mkdir()
    report = _counter(progress, len(tensors.groups))
    if form.format == "torch-dist":
        write_torch_dist(directory, tensors, common, report)
    else:
        write_rank_folders(directory, tensors, common, form.layout, form.naming, report)


def _counter(progress: Progress, total: int) -> Callable[[], None]:
    """Return a function that reports one more group as done."""
    done = 0

    def report() -> None:
        nonlocal done
        progress(done, total)
        done += 1

    return report
