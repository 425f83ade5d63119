"""LoRA factors: conversion between the decoder's names and axes and those of PEFT.

Every adapted weight has the axis embed, or a latent, on one side. One of its factors has the shape
of the weight with the rank in place of that axis, so the family's table says how to transpose,
pack and name it. Where Hugging Face packs several weights into one tensor, PEFT has one pair of
factors for all of them: the decoder's factors are concatenated, each with zeros for the outputs of
the other weights. This is exact, and multiplies the rank by the number of packed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from graphtrain.config.schema import Adapter, Model
from graphtrain.models.lora.trainable import fully_trained_paths, is_of_experts, lora_paths
from graphtrain.models.shapes import STACKS, axis_size, parameter_arrays
from graphtrain.weights.exported_arrays import with_unpadded_vocab
from graphtrain.weights.families import Family, family_of_config, family_of_model
from graphtrain.weights.families.family import (
    LayerWeights,
    is_stacked,
    to_decoder,
    to_hugging_face,
)
from graphtrain.weights.hf_files import read_config

EMBEDDING = "embedding/tokens"


@dataclass(frozen=True)
class AdapterTable:
    """Family, model and weights that an adapter trains."""

    family: Family
    model: Model
    adapter: Adapter
    targets: frozenset[str]  # paths of weights with LoRA factors
    modules_to_save: frozenset[str]  # paths of weights trained in full (PEFT: modules_to_save)

    @classmethod
    def from_folder(cls, side: Path, model: Model, adapter: Adapter) -> AdapterTable:
        """Return the table for a model whose Hugging Face files are in the folder `side`."""
        family, unpadded = family_of_folder(side, model)
        targets = frozenset(lora_paths(model, adapter))
        modules_to_save = frozenset(fully_trained_paths(model, adapter))
        return cls(family, unpadded, adapter, targets, modules_to_save)

    @property
    def tie_word_embeddings(self) -> str | None:
        """Tensor name of an LM head tied to an embedding that is trained in full, else None.

        PEFT ties only heads with certain names to its copy of the embedding, so the exported folder
        contains a copy of its own for the head.
        """
        if not (self.model.tie_word_embeddings and EMBEDDING in self.modules_to_save):
            return None
        rows = (row.name for row in self.family.mappings if row.paths == ("head",))
        return next(rows, "lm_head.weight")

    def adapted_weights(self) -> Iterator[LayerWeights]:
        """Yield the weights that have LoRA factors, without experts: see expert_factors.

        Those of dense layers before a mixture are yielded for each layer.
        """
        for layer_weights in weights_of_layers(self.family, self.model):
            if self.targets & set(layer_weights.row.paths):
                yield layer_weights

    def fully_trained_weights(self) -> Iterator[LayerWeights]:
        """Yield the weights that are trained in full."""
        for layer_weights in self.family.weights(self.model):
            if self.modules_to_save & set(layer_weights.row.paths):
                yield layer_weights


def family_of_folder(side: Path, model: Model) -> tuple[Family, Model]:
    """Return the family of a model, and the model without padding of the vocabulary.

    Args:
        side: Folder of Hugging Face files; without config.json, the family follows from the model.
        model: Settings of the model.
    """
    config = read_config(side) if (side / "config.json").is_file() else None
    family = family_of_config(config) if config else family_of_model(model)
    return family, with_unpadded_vocab(model, config)


def weights_of_layers(family: Family, model: Model) -> Iterator[LayerWeights]:
    """Yield the weights of all layers, without experts; those of dense layers one by one."""
    for layer_weights in family.weights(model):
        if is_of_experts(model, layer_weights.row.paths[0]):
            continue
        if "{dense}" in layer_weights.row.name:
            for layer, name in enumerate(layer_weights.names):
                yield replace(layer_weights, layer=layer, names=(name,))
        elif layer_weights.layer is not None:
            yield layer_weights


def module_of(layer_weights: LayerWeights) -> str:
    """Return the name of the PyTorch module that owns a weight."""
    return layer_weights.names[0].removesuffix(".weight")


def input_axes(path: str, model: Model) -> tuple[str, bool]:
    """Return the axis that the rank replaces in a factor of a weight, and whether it is the input.

    It is embed, or the latent that a weight of latent attention multiplies.
    """
    axes = [axis for axis in parameter_arrays(model)[path].axes if axis not in STACKS]
    shared = "embed" if "embed" in axes else axes[0]
    assert shared is not None
    return shared, axes[0] == shared


def rank_axis(layer_weights: LayerWeights, model: Model) -> int:
    """Return the index of the shared axis in Hugging Face's two-dimensional tensor."""
    return _shape(layer_weights, _resized(layer_weights, model, 1)).index(1)


def peft_shapes(
    layer_weights: LayerWeights, rank: int, model: Model
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of PEFT's factors lora_A (rank, in) and lora_B (out, rank)."""
    other_size = max(_shape(layer_weights, _resized(layer_weights, model, 1)))
    axis, is_input = input_axes(layer_weights.row.paths[0], model)
    size = axis_size(model, axis)
    in_size, out_size = (size, other_size) if is_input else (other_size, size)
    return (rank, in_size), (out_size, rank)


def read_in_layer(
    read: Callable[[Sequence[str], int | None], list[np.ndarray]],
    paths: Sequence[str],
    layer: int | None,
) -> list[np.ndarray]:
    """Return the arrays of a layer, which `read` returns for all dense layers together."""
    if paths[0].startswith("dense_layers/") and layer is not None:
        return [array[layer] for array in read(paths, None)]
    return read(paths, layer)


def _resized(layer_weights: LayerWeights, model: Model, size: int) -> Model:
    """Return a model in which the shared axis of a weight has a size; its dense layers are one."""
    axis, _ = input_axes(layer_weights.row.paths[0], model)
    if is_stacked(layer_weights.row):
        assert model.moe is not None
        model = replace(model, moe=replace(model.moe, dense_layers=1))
    if axis == "embed":
        return replace(model, embed=size)
    assert model.latent_attention is not None
    return replace(
        model, latent_attention=replace(model.latent_attention, **{f"{axis}_rank": size})
    )


def _array_shape(path: str, model: Model) -> tuple[int, ...]:
    """Return the shape of an array in one layer, also in a dense one."""
    spec = parameter_arrays(model)[path]
    return spec.shape[1:] if spec.axes[0] in STACKS else spec.shape


def _tensor(layer_weights: LayerWeights, arrays: list[np.ndarray], model: Model) -> np.ndarray:
    """Return Hugging Face's tensor of the arrays of one layer."""
    stacked = [array[None] for array in arrays] if is_stacked(layer_weights.row) else arrays
    ((_, tensor),) = to_hugging_face(layer_weights, stacked, model)
    return tensor


def _shape(layer_weights: LayerWeights, model: Model) -> tuple[int, ...]:
    empty = [np.zeros(_array_shape(path, model), np.int8) for path in layer_weights.row.paths]
    return _tensor(layer_weights, empty, model).shape


def to_peft(
    layer_weights: LayerWeights, pairs: dict[str, tuple[np.ndarray, np.ndarray]], model: Model
) -> tuple[np.ndarray, np.ndarray]:
    """Convert the decoder's factor pairs, by path, to lora_A (rank, in) and lora_B (out, rank)."""
    axis, lora_a_factors, lora_b_factors = rank_axis(layer_weights, model), [], []
    for path, (decoder_a, decoder_b) in pairs.items():
        _, is_input = input_axes(path, model)
        weight_factor, shared_factor = (
            (decoder_b, decoder_a) if is_input else (decoder_a, decoder_b)
        )
        rank = shared_factor.shape[1] if is_input else shared_factor.shape[0]
        rank_model = _resized(layer_weights, model, rank)
        arrays = [
            weight_factor
            if other_path == path
            else np.zeros(_array_shape(other_path, rank_model), np.float32)
            for other_path in layer_weights.row.paths
        ]
        tensor = _tensor(layer_weights, arrays, rank_model)
        packed_factor = np.moveaxis(tensor, axis, 0)  # (rank, in or out)
        lora_a_factors.append(shared_factor.T if is_input else packed_factor)
        lora_b_factors.append(packed_factor.T if is_input else shared_factor.T)
    return np.concatenate(lora_a_factors), np.concatenate(lora_b_factors, 1)


def from_peft(
    layer_weights: LayerWeights, first: np.ndarray, second: np.ndarray, model: Model
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Convert lora_A (rank, in) and lora_B (out, rank) to the decoder's factor pairs by path."""
    _, is_input = input_axes(layer_weights.row.paths[0], model)
    packed_factor = second.T if is_input else first
    arrays = to_decoder(
        layer_weights,
        [np.moveaxis(packed_factor, 0, rank_axis(layer_weights, model))],
        _resized(layer_weights, model, len(first)),
    )
    in_layer = [array[0] for array in arrays] if is_stacked(layer_weights.row) else arrays
    return {
        path: (first.T, array) if is_input else (array, second.T)
        for path, array in zip(layer_weights.row.paths, in_layer, strict=True)
    }
