"""Sources for runs with an adapter: merged weights, and base weights as the run uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from graphtrain.config.schema import Adapter, Model, Program
from graphtrain.models.lora.quantize import fake_quantize
from graphtrain.models.lora.trainable import (
    LORA_A,
    LORA_B,
    fully_trained_paths,
    is_bfloat16,
    is_of_experts,
    is_quantized,
    lora_paths,
)
from graphtrain.models.shapes import parameter_arrays
from graphtrain.weights.sources import WeightSource


class TrainedAdapter(Protocol):
    """Arrays that a run with an adapter trains: of a checkpoint, or on the devices."""

    directory: Path
    side: Path
    program: Program
    model: Model

    @property
    def files(self) -> list[Path]: ...

    def read(self, paths: Sequence[str], layer: int | None) -> list[np.ndarray]: ...


class MergedWeights:
    """Weights of a run with the adapter merged into its (rounded or quantized) base weights."""

    def __init__(self, run: TrainedAdapter, base: WeightSource) -> None:
        assert run.program.adapter is not None
        self.run, self.adapter = run, run.program.adapter
        self.directory, self.side, self.model = run.directory, run.side, run.model
        self.base = base
        self._adapted = set(lora_paths(self.model, self.adapter))
        self._whole = set(fully_trained_paths(self.model, self.adapter))

    @property
    def files(self) -> list[Path]:
        return [*self.run.files, *self.base.files]

    def dtype(self, path: str) -> np.dtype | None:
        return self.base.dtype(path)

    def read(self, paths: Sequence[str], layer: int | None) -> list[np.ndarray]:
        trained = [name for path in paths for name in self._trained(path)]
        arrays = dict(zip(trained, self.run.read(trained, layer), strict=True)) if trained else {}
        return [self._merge(path, layer, arrays) for path in paths]

    def part(self, path: str, layer: int | None, index: tuple[slice, ...]) -> np.ndarray:
        return self.read([path], layer)[0][index]

    def _trained(self, path: str) -> list[str]:
        if path in self._whole:
            return [path]
        return [f"{path}/{LORA_A}", f"{path}/{LORA_B}"] if path in self._adapted else []

    def _merge(self, path: str, layer: int | None, trained: dict[str, np.ndarray]) -> np.ndarray:
        if path in trained:
            return trained[path]
        (base,) = self.base.read([path], layer)
        base_weights = round_trip_base_dtype(path, base, self.model, self.adapter)
        if path not in self._adapted:
            return base_weights
        factors = trained[f"{path}/{LORA_A}"], trained[f"{path}/{LORA_B}"]
        product = _lora_product(path, *factors, self.model)
        return base_weights.astype(np.float32) + np.float32(self.adapter.scale) * product


class AdaptedWeights:
    """Weights with the factors of a LoRA adapter merged into them.

    Args:
        base: The weights.
        factors: First and second factor, with the scale in one of them, by path and layer.
    """

    def __init__(
        self, base: WeightSource, factors: Mapping[tuple[str, int], tuple[np.ndarray, np.ndarray]]
    ) -> None:
        self._base, self._factors = base, factors
        self.directory, self.side, self.model = base.directory, base.side, base.model
        self.files = base.files

    def dtype(self, path: str) -> np.dtype | None:
        return self._base.dtype(path)

    def read(self, paths: Sequence[str], layer: int | None) -> list[np.ndarray]:
        named_weights = zip(paths, self._base.read(paths, layer), strict=True)
        return [self._merge(path, layer, weights) for path, weights in named_weights]

    def part(self, path: str, layer: int | None, index: tuple[slice, ...]) -> np.ndarray:
        if path.startswith("dense_layers/") or (path, layer) in self._factors:
            return self.read([path], layer)[0][index]
        return self._base.part(path, layer, index)

    def _merge(self, path: str, layer: int | None, weights: np.ndarray) -> np.ndarray:
        if path.startswith("dense_layers/"):
            return np.stack([self._merge_layer(path, *row) for row in enumerate(weights)])
        return weights if layer is None else self._merge_layer(path, layer, weights)

    def _merge_layer(self, path: str, layer: int, weights: np.ndarray) -> np.ndarray:
        if (path, layer) not in self._factors:
            return weights
        return weights.astype(np.float32) + _product(*self._factors[path, layer])


def _lora_product(path: str, first: np.ndarray, second: np.ndarray, model: Model) -> np.ndarray:
    """Return the product of a weight's factors in a layer, of each expert or dense layer."""
    if is_of_experts(model, path):
        return np.matmul(first, second)
    if path.startswith("dense_layers/"):  # all together
        return np.stack([_product(*pair) for pair in zip(first, second, strict=True)])
    return _product(first, second)


def _product(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.tensordot(first, second, 1)


class QuantizedBase:
    """Base weights as a run with an adapter computes with them: rounded or quantized."""

    def __init__(self, base: WeightSource, adapter: Adapter) -> None:
        self._base, self._adapter = base, adapter
        self.directory, self.side, self.model = base.directory, base.side, base.model
        self.files = base.files
        self._whole = set(fully_trained_paths(base.model, adapter))

    def dtype(self, path: str) -> np.dtype | None:
        return self._base.dtype(path)

    def read(self, paths: Sequence[str], layer: int | None) -> list[np.ndarray]:
        named_weights = zip(paths, self._base.read(paths, layer), strict=True)
        return [
            weights
            if path in self._whole
            else round_trip_base_dtype(path, weights, self.model, self._adapter)
            for path, weights in named_weights
        ]

    def part(self, path: str, layer: int | None, index: tuple[slice, ...]) -> np.ndarray:
        return self.read([path], layer)[0][index]


def round_trip_base_dtype(
    path: str, weights: np.ndarray, model: Model, adapter: Adapter
) -> np.ndarray:
    """Return an array of the base weights after rounding or quantization to its stored dtype."""
    spec = parameter_arrays(model)[path]
    if is_bfloat16(path, spec, adapter):
        return weights.astype(ml_dtypes.bfloat16).astype(np.float32)
    if is_quantized(path, spec, adapter):
        assert adapter.base_dtype in ("int8", "nf4")
        return fake_quantize(weights, adapter.base_dtype)
    return weights
