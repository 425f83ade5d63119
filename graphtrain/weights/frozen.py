"""Frozen and trainable parameters of a run with an adapter, loaded onto its devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphtrain.checkpoints.layer_rows import read_reordered_part, stacked_pair
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Program, Run
from graphtrain.models.lora.quantize import QuantizationKind, block_size, quantize
from graphtrain.models.lora.trainable import CODES, LORA_A, LORA_B, SCALES
from graphtrain.weights.imported_folder import HuggingFaceWeights
from graphtrain.weights.initial import ArrayLoader, Index, PartReader, part_reader
from graphtrain.weights.peft_import import PeftAdapter
from graphtrain.weights.sources import WeightSource
from lowering.trees import Tree, flatten, unflatten
from sharding_rules.pipeline import Stages

if TYPE_CHECKING:
    from graphtrain.weights.imported_peft import ImportedPeftAdapter


def open_adapter(
    program: Program, run: Run, weights: WeightSource | HuggingFaceWeights
) -> PeftAdapter | ImportedPeftAdapter | None:
    """Open the adapter that run.init_adapter_from names, or return None if it is not set.

    Raises:
        WeightsError: the adapter does not match [program.adapter].
    """
    if run.init_adapter_from is None:
        return None
    directory = Path(run.init_adapter_from)
    if isinstance(weights, HuggingFaceWeights):
        from graphtrain.weights.imported_peft import ImportedPeftAdapter

        assert program.adapter is not None
        model: Any = program.model
        vocab = model.vocab or 0, model.vocab_tokens
        return ImportedPeftAdapter(directory, program.adapter, weights.names, vocab, model)
    return PeftAdapter(directory, program, weights.side)


def load_frozen_parameters(
    weights: WeightSource | HuggingFaceWeights,
    program: ResolvedProgram,
    described: Tree,
    fill: ArrayLoader,
    trained: Tree | None = None,
) -> Tree:
    """Load the frozen weights, quantized to the base dtype of the adapter settings.

    Args:
        weights: Base weights.
        program: the program.
        described: Tree of frozen arrays with their shapes, dtypes and shardings.
        fill: The backend's function that loads arrays onto devices.
        trained: Tree of trained arrays, of which some are in the same folder.
    """
    shapes, adapter = _weight_shapes(described), program.adapter
    others = {} if trained is None else _weight_shapes(trained)
    read = _reader(weights, program, shapes | others, is_complete=True)
    if adapter is None or adapter.base_dtype not in ("int8", "nf4"):
        return fill(described, read)
    quantized = _QuantizedWeights(read, shapes, adapter.base_dtype)

    def read_part(path: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        stem, _, kind = path.rpartition("/")
        if kind in (CODES, SCALES):
            return quantized.part(stem, kind, shape, index)
        return read(path, shape, index)

    return fill(described, read_part)


def _reader(
    weights: WeightSource | HuggingFaceWeights,
    program: ResolvedProgram,
    shapes: dict[str, tuple[int, ...]],
    *,
    is_complete: bool,
) -> PartReader:
    """Return a function that reads parts of weights of these shapes, in a program's layout."""
    if isinstance(weights, HuggingFaceWeights):
        return weights.part_reader(shapes, program.stages, is_complete=is_complete)
    return part_reader(weights, program)


def _weight_shapes(described: Tree) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that arrays store, by path; factors are none."""
    shapes = {}
    for path, leaf in flatten(described).items():
        shape = tuple(leaf.shape)
        stem, _, name = path.rpartition("/")
        if name == CODES:
            per_code = 2 if leaf.dtype == np.uint8 else 1
            shapes[stem] = (*shape[:-1], shape[-1] * per_code)
        elif name not in (SCALES, LORA_A, LORA_B):
            shapes[path] = shape
    return shapes


def load_trainable_parameters(
    weights: WeightSource | HuggingFaceWeights,
    adapter: PeftAdapter | ImportedPeftAdapter | None,
    program: ResolvedProgram,
    described: Tree,
    fill: ArrayLoader,
    new: Tree | None,
) -> Tree:
    """Load the trainable parameters: LoRA factors, and weights that are trained in full.

    Args:
        weights: Base weights.
        adapter: Initial adapter; None to start with a new one.
        program: the program.
        described: Tree of parameters with their shapes, dtypes and shardings.
        fill: The backend's function that loads arrays onto devices.
        new: Parameters from the graph `init`. Without them, the factors of a new adapter are zeros,
            so the adapter has no effect.
    """
    initialized = {} if new is None or adapter is not None else flatten(new)
    paths = {
        path: spec
        for path, spec in flatten(described).items()
        if not (path in initialized and path.endswith((f"/{LORA_A}", f"/{LORA_B}")))
    }
    shapes = _weight_shapes(unflatten(paths)) if paths else {}
    read = _reader(weights, program, shapes, is_complete=False)
    arrays = {} if adapter is None else _adapter_arrays(adapter, program, described)

    def read_part(path: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        if path in arrays:
            return _part_in_stages(arrays[path], path, shape, index, program.stages)
        if path.endswith((f"/{LORA_A}", f"/{LORA_B}")):
            return np.zeros(shape, np.float32)[index]
        return read(path, shape, index)

    filled = flatten(fill(unflatten(paths), read_part)) if paths else {}
    return unflatten({path: filled.get(path, initialized.get(path)) for path in flatten(described)})


def _adapter_arrays(
    adapter: PeftAdapter | ImportedPeftAdapter, program: ResolvedProgram, described: Tree
) -> dict[str, np.ndarray]:
    """Return the arrays of an adapter by path, their layers in order."""
    if isinstance(adapter, PeftAdapter):
        return adapter.arrays
    return adapter.arrays(described, program.stages)


def _part_in_stages(
    array: np.ndarray, path: str, shape: tuple[int, ...], index: Index, stages: Stages | None
) -> np.ndarray:
    """Return a part of an array whose layers are in order, in the rows of a program's stages."""
    if stages is None or array.shape == shape:  # as many rows, in order
        return array[index]
    layers = tuple(range(sum(stages.layers)))
    pair = stacked_pair(path, (array.shape, shape), (layers, stages.rows))
    assert pair is not None, f"{path}: {array.shape} are not the layers of {shape}"
    in_order, target = pair
    return read_reordered_part(target, in_order, index, lambda part: array[part], array.dtype)


class _QuantizedWeights:
    """Codes and scales of block-wise quantized weights; caches the weight that was read last."""

    def __init__(
        self, read: PartReader, shapes: dict[str, tuple[int, ...]], kind: QuantizationKind
    ) -> None:
        self._read, self._shapes = read, shapes
        self._kind: QuantizationKind = kind
        self._held: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
        self._stem = ""

    def part(self, stem: str, kind: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        """Return a part of the codes or scales of a weight.

        Args:
            stem: Path of the weight.
            kind: CODES or SCALES.
            shape: Unsharded shape of the codes or scales.
            index: The part, as an index into that shape.
        """
        weight_shape = self._shapes[stem]
        block = block_size(weight_shape[-1])
        weights_per_entry = weight_shape[-1] // shape[-1]  # number of weights per code or per scale
        *leading, last_axis = (
            slice(*axis_slice.indices(size)) for axis_slice, size in zip(index, shape, strict=True)
        )
        begin, end = last_axis.start * weights_per_entry, last_axis.stop * weights_per_entry
        block_slice = slice(begin // block * block, -(-end // block) * block)
        codes, scales = self._quantized_blocks(stem, weight_shape, (*leading, block_slice), block)
        if kind == SCALES:
            return scales
        first_entry = (begin - block_slice.start) // weights_per_entry
        return codes[..., first_entry : first_entry + last_axis.stop - last_axis.start]

    def _quantized_blocks(
        self, stem: str, weight_shape: tuple[int, ...], index: Index, block: int
    ) -> tuple[np.ndarray, np.ndarray]:
        if stem != self._stem:
            self._held, self._stem = {}, stem
        key = tuple((axis_slice.start, axis_slice.stop) for axis_slice in index)
        if key not in self._held:
            self._held[key] = quantize(self._read(stem, weight_shape, index), self._kind, block)
        return self._held[key]
