"""Frozen and trainable parameters of a run with an adapter, loaded onto its devices."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from graphtrain.checkpoints.layer_rows import LayerRows, StackedArray, read_reordered_part
from graphtrain.config.resolve import ResolvedProgram, layer_rows
from graphtrain.config.schema import Model, Program, Run
from graphtrain.models.lora.quantize import QuantizationKind, block_size, quantize
from graphtrain.models.lora.trainable import CODES, LORA_A, LORA_B, SCALES
from graphtrain.models.shapes import parameter_arrays
from graphtrain.weights.initial import ArrayLoader, Index, PartReader, part_reader
from graphtrain.weights.peft import PeftAdapter
from graphtrain.weights.sources import WeightSource
from lowering.trees import Tree, flatten, unflatten


def open_adapter(program: Program, run: Run, weights: WeightSource) -> PeftAdapter | None:
    """Open the adapter that run.init_adapter_from names, or return None if it is not set.

    Raises:
        WeightsError: the adapter does not match [program.adapter].
    """
    if run.init_adapter_from is None:
        return None
    return PeftAdapter(Path(run.init_adapter_from), program, weights.side)


def load_frozen_parameters(
    weights: WeightSource, program: ResolvedProgram, described: Tree, fill: ArrayLoader
) -> Tree:
    """Load the frozen weights, quantized to the base dtype of the adapter settings."""
    read, adapter = part_reader(weights, program), program.adapter
    if adapter is None or adapter.base_dtype not in ("int8", "nf4"):
        return fill(described, read)
    quantized = _QuantizedWeights(read, program.model, adapter.base_dtype)

    def read_part(path: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        stem, _, kind = path.rpartition("/")
        if kind in (CODES, SCALES):
            return quantized.part(stem, kind, shape, index)
        return read(path, shape, index)

    return fill(described, read_part)


def load_trainable_parameters(
    weights: WeightSource,
    adapter: PeftAdapter | None,
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
    read = part_reader(weights, program)

    def read_part(path: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        if adapter is not None and path in adapter.arrays:
            return _part_in_stages(adapter.arrays[path], path, shape, index, layer_rows(program))
        if path.endswith((f"/{LORA_A}", f"/{LORA_B}")):
            return np.zeros(shape, np.float32)[index]
        return read(path, shape, index)

    filled = flatten(fill(unflatten(paths), read_part)) if paths else {}
    return unflatten({path: filled.get(path, initialized.get(path)) for path in flatten(described)})


def _part_in_stages(
    array: np.ndarray, path: str, shape: tuple[int, ...], index: Index, rows: LayerRows
) -> np.ndarray:
    """Return a part of an array whose layers are in order, in the rows of a program's stages."""
    layers = tuple(range(sum(layer is not None for layer in rows)))
    in_order, target = StackedArray(path, array.shape, layers), StackedArray(path, shape, rows)
    return read_reordered_part(target, in_order, index, lambda part: array[part], array.dtype)


class _QuantizedWeights:
    """Codes and scales of block-wise quantized weights; caches the weight that was read last."""

    def __init__(self, read: PartReader, model: Model, kind: QuantizationKind) -> None:
        self._read = read
        self._kind: QuantizationKind = kind
        self._arrays = parameter_arrays(model)
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
        weight_shape = (*shape[:-1], self._arrays[stem].shape[-1])  # layers may be in stages
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
