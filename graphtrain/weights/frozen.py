"""What a run that keeps weights as they are puts on its devices: the kept, and what goes beside."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from graphtrain.config.schema import Config, Program
from graphtrain.models.lora.quantize import QuantizationKind, block_size, quantize
from graphtrain.models.lora.trainable import CODES, LORA_A, LORA_B, SCALES
from graphtrain.models.shapes import parameter_arrays
from graphtrain.weights.peft import PeftAdapter
from graphtrain.weights.sources import Source
from graphtrain.weights.start import Fill, Index, Read, reader
from lowering.trees import Tree, flatten, unflatten


def open_adapter(config: Config, weights: Source) -> PeftAdapter | None:
    """The adapter of run.initial_adapter, if it is set.

    Raises:
        WeightsError: it is another than [program.adapter] describes.
    """
    if config.run.initial_adapter is None:
        return None
    return PeftAdapter(Path(config.run.initial_adapter), config.program, weights.side)


def frozen_parameters(weights: Source, program: Program, described: Tree, fill: Fill) -> Tree:
    """The weights that no step changes, in the bits that the program keeps them in."""
    read, adapter = reader(weights, program), program.adapter
    if adapter is None or adapter.base not in ("int8", "nf4"):
        return fill(described, read)
    blocks = _Blocks(read, program, adapter.base)

    def part(path: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        stem, _, kind = path.rpartition("/")
        if kind in (CODES, SCALES):
            return blocks.part(stem, kind, shape, index)
        return read(path, shape, index)

    return fill(described, part)


def trained_parameters(
    weights: Source,
    adapter: PeftAdapter | None,
    program: Program,
    described: Tree,
    fill: Fill,
    new: Tree | None,
) -> Tree:
    """The parameters that are trained: adapters, and what is trained whole beside them.

    Args:
        weights: The base.
        adapter: To go on from; none: new ones.
        program: Settings.
        described: Shapes, dtypes and shardings.
        fill: The backend's.
        new: Parameters that `init` made; without them new adapters are zeros, which do nothing.
    """
    begun = {} if new is None or adapter is not None else flatten(new)
    paths = {
        path: like
        for path, like in flatten(described).items()
        if not (path in begun and path.endswith((f"/{LORA_A}", f"/{LORA_B}")))
    }
    read = reader(weights, program)

    def part(path: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        if adapter is not None and path in adapter.arrays:
            return adapter.arrays[path][index]
        if path.endswith((f"/{LORA_A}", f"/{LORA_B}")):
            return np.zeros(shape, np.float32)[index]
        return read(path, shape, index)

    filled = flatten(fill(unflatten(paths), part)) if paths else {}
    return unflatten({path: filled.get(path, begun.get(path)) for path in flatten(described)})


class _Blocks:
    """Codes and scales of the weight read last: each is asked for both, part by part."""

    def __init__(self, read: Read, program: Program, kind: QuantizationKind) -> None:
        self._read = read
        self._kind: QuantizationKind = kind
        self._arrays = parameter_arrays(program.model)
        self._held: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
        self._stem = ""

    def part(self, stem: str, kind: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        """Of the codes or scales of a weight."""
        whole = self._arrays[stem].shape
        block = block_size(whole[-1])
        each = whole[-1] // shape[-1]  # weights in a code, or under a scale
        *front, last = (slice(*one.indices(size)) for one, size in zip(index, shape, strict=True))
        begin, end = last.start * each, last.stop * each
        around = slice(begin // block * block, -(-end // block) * block)
        codes, scales = self._quantised(stem, whole, (*front, around), block)
        if kind == SCALES:
            return scales
        first = (begin - around.start) // each
        return codes[..., first : first + last.stop - last.start]

    def _quantised(
        self, stem: str, whole: tuple[int, ...], index: Index, block: int
    ) -> tuple[np.ndarray, np.ndarray]:
        if stem != self._stem:
            self._held, self._stem = {}, stem
        key = tuple((one.start, one.stop) for one in index)
        if key not in self._held:
            self._held[key] = quantize(self._read(stem, whole, index), self._kind, block)
        return self._held[key]
