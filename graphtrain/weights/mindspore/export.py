"""Export of the decoder's weights to `.ckpt` files of MindSpore, one for each rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from graphtrain.checkpoints.output_directory import create_directory
from graphtrain.config.render import render_model
from graphtrain.config.schema import Model
from graphtrain.errors import WeightsError
from graphtrain.weights.conversion import ConversionSummary, Progress, summarize
from graphtrain.weights.exported_arrays import exported_dtype, remove_padding, with_unpadded_vocab
from graphtrain.weights.families.family import LayerWeights, to_hugging_face
from graphtrain.weights.files import numpy_dtype_of
from graphtrain.weights.finite import ExportedValues
from graphtrain.weights.hf_files import read_config
from graphtrain.weights.imported_run import run_of_imported_model
from graphtrain.weights.megatron.layout import ModelChunk, RankLayout
from graphtrain.weights.mindspore.ckpt_file import CkptWriter
from graphtrain.weights.mindspore.rows import check_llama, mindformers_llama, shard_axis
from graphtrain.weights.open import open_weights
from lowering.ascend.strategy import strategy_file
from sharding_rules.arrays import ArraySpec
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import ArrayLayout

CHECKPOINT, STRATEGIES = "checkpoint.ckpt", "strategy"
_TENSOR = "tensor"


def to_mindspore(
    source: Path,
    destination: Path,
    progress: Progress,
    layout: RankLayout,
    dtype: str | None = None,
    step: int | None = None,
    *,
    averaged: bool = False,
) -> ConversionSummary:
    """Convert a converted folder or a run into `.ckpt` files with MindFormers' names of Llama.

    Args:
        source: Converted folder, or directory of a run.
        destination: Folder to create, with rank_N/checkpoint.ckpt, strategies and model.toml.
        progress: Called for each group of arrays.
        layout: Tensor and pipeline ranks.
        dtype: Dtype of the tensors; None: as of the initial weights, or float32.
        step: Step of the run's checkpoint; None for the last.
        averaged: Whether to write the moving average of the run's weights.

    Raises:
        WeightsError: MindFormers' Llama has no such model, or the ranks cannot divide it.
    """
    if run_of_imported_model(source) is not None:
        raise WeightsError(
            f"{source} is a run of a PyTorch model; export it to Hugging Face, convert that with "
            "hf-to-graphtrain, and export the result"
        )
    weights = open_weights(source, step, averaged=averaged)
    has_config = (weights.side / "config.json").is_file()
    model = with_unpadded_vocab(weights.model, read_config(weights.side) if has_config else None)
    check_llama(model)
    _check_head(model, layout)
    layout.check(model)
    family, chosen = mindformers_llama(), dtype and numpy_dtype_of("--dtype", dtype)
    groups, arrays, values = list(family.weights(model)), {}, ExportedValues()
    with create_directory(destination) as directory:
        ranks = _RankFiles(directory, layout, model)
        for done, group in enumerate(groups):
            progress(done, len(groups))
            stored = weights.read(group.row.paths, group.layer)
            kind = exported_dtype(group.row.paths[0], weights, chosen or None, np.dtype(np.float32))
            unpadded = [
                remove_padding(path, array, model)
                for path, array in zip(group.row.paths, stored, strict=True)
            ]
            for name, tensor in to_hugging_face(group, unpadded, model):
                arrays[name] = kind, tensor.shape
                ranks.write(group, name, values.cast(name, tensor, kind))
        ranks.close()
        (directory / "model.toml").write_text(render_model(model))
    values.report(source)
    progress(len(groups), len(groups))
    return summarize(family, model, arrays)


def _check_head(model: Model, layout: RankLayout) -> None:
    if model.tie_word_embeddings and layout.pipeline > 1:
        raise WeightsError(
            "program.model.tie_word_embeddings = true needs --pipeline 1: the LM head in the last "
            "stage is the embedding, which the files have in the first stage only; it would "
            "stay at its initial values there, with no more than a warning of MindSpore"
        )


class _RankFiles:
    """The files of all ranks, and their strategies."""

    def __init__(self, directory: Path, layout: RankLayout, model: Model) -> None:
        self._directory, self._layout = directory, layout
        self._chunks = layout.chunks(model)
        self._mesh = MeshShape({_TENSOR: layout.tensor})
        self._layouts: list[dict[str, ArrayLayout]] = [{} for _ in self._chunks]
        self._writers = []
        for rank in range(layout.tensor * layout.pipeline):
            folder = directory / f"rank_{rank}"
            folder.mkdir()
            self._writers.append(CkptWriter(folder / CHECKPOINT))

    def write(self, group: LayerWeights, name: str, tensor: np.ndarray) -> None:
        """Write the shards of a tensor to the ranks of its pipeline stage."""
        stage = next(chunk.pipeline_rank for chunk in self._chunks if _has(chunk, group))
        ranks = self._layout.tensor
        axis = shard_axis(name, tensor.shape, ranks) if ranks > 1 else None
        split = tuple((_TENSOR,) if index == axis else () for index in range(tensor.ndim))
        spec = ArraySpec(tensor.shape, (None,) * tensor.ndim)
        self._layouts[stage][name] = ArrayLayout(spec, split)
        shards = [tensor] * ranks if axis is None else np.split(tensor, ranks, axis)
        for rank, shard in enumerate(shards):
            self._writers[stage * ranks + rank].write(name, shard)

    def close(self) -> None:
        """Finish the files and write the strategy of each rank."""
        folder = self._directory / STRATEGIES
        folder.mkdir()
        for rank, writer in enumerate(self._writers):
            writer.close()
            stage = rank // self._layout.tensor
            content = strategy_file(self._layouts[stage], self._mesh, stage)
            (folder / f"ckpt_strategy_rank_{rank}.ckpt").write_bytes(content)


def _has(chunk: ModelChunk, group: LayerWeights) -> bool:
    """Return whether a pipeline stage has a tensor."""
    if group.layer is not None:
        return chunk.has_layer(group.layer)
    return chunk.is_first if "embeddings" in group.row.name else chunk.is_last
