"""LoRA factors: conversion between the decoder's names and axes and those of PEFT.

Every adapted weight has the axis embed on one side. One of its factors has the shape of the weight
with the rank in place of embed, so the family's table determines how to transpose, pack and name
it. Where Hugging Face packs several weights into one tensor, PEFT has one pair of factors for all
of them: the decoder's factors are concatenated, each with zeros for the outputs of the other
weights. This is exact, and multiplies the rank by the number of packed weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from graphtrain.config.schema import Adapter, Model
from graphtrain.models.lora.trainable import fully_trained_paths, is_of_experts, lora_paths
from graphtrain.weights.convert import read_config, with_unpadded_vocab
from graphtrain.weights.families import Family, family_of_config, family_of_model
from graphtrain.weights.families.family import (
    LayerWeights,
    array_shape,
    to_decoder,
    to_hugging_face,
)

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
        """Yield the weights that have LoRA factors, without experts: see expert_factors."""
        targets = {path for path in self.targets if not is_of_experts(self.model, path)}
        for layer_weights in self.family.weights(self.model):
            if targets & set(layer_weights.row.paths):
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


def module_of(layer_weights: LayerWeights) -> str:
    """Return the name of the PyTorch module that owns a weight."""
    return layer_weights.names[0].removesuffix(".weight")


def embed_is_input(path: str, model: Model) -> bool:
    """Return whether the first axis of a weight, its input, is embed."""
    return array_shape(path, replace(model, embed=1))[0] == 1


def rank_axis(layer_weights: LayerWeights, model: Model) -> int:
    """Return the index of the axis embed in Hugging Face's two-dimensional tensor."""
    return _shape(layer_weights, replace(model, embed=1)).index(1)


def peft_shapes(
    layer_weights: LayerWeights, rank: int, model: Model
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of PEFT's factors lora_A (rank, in) and lora_B (out, rank)."""
    other_size = max(_shape(layer_weights, replace(model, embed=1)))
    input_is_embed = embed_is_input(layer_weights.row.paths[0], model)
    in_size, out_size = (model.embed, other_size) if input_is_embed else (other_size, model.embed)
    return (rank, in_size), (out_size, rank)


def _shape(layer_weights: LayerWeights, model: Model) -> tuple[int, ...]:
    empty = [np.zeros(array_shape(path, model), np.int8) for path in layer_weights.row.paths]
    ((_, tensor),) = to_hugging_face(layer_weights, empty, model)
    return tensor.shape


def to_peft(
    layer_weights: LayerWeights, pairs: dict[str, tuple[np.ndarray, np.ndarray]], model: Model
) -> tuple[np.ndarray, np.ndarray]:
    """Convert the decoder's factor pairs, by path, to lora_A (rank, in) and lora_B (out, rank)."""
    axis, lora_a_factors, lora_b_factors = rank_axis(layer_weights, model), [], []
    for path, (decoder_a, decoder_b) in pairs.items():
        input_is_embed = embed_is_input(path, model)
        weight_factor, embed_factor = (
            (decoder_b, decoder_a) if input_is_embed else (decoder_a, decoder_b)
        )
        rank = embed_factor.shape[1] if input_is_embed else embed_factor.shape[0]
        rank_model = replace(model, embed=rank)
        arrays = [
            weight_factor
            if other_path == path
            else np.zeros(array_shape(other_path, rank_model), np.float32)
            for other_path in layer_weights.row.paths
        ]
        ((_, tensor),) = to_hugging_face(layer_weights, arrays, rank_model)
        packed_factor = np.moveaxis(tensor, axis, 0)  # (rank, in or out)
        lora_a_factors.append(embed_factor.T if input_is_embed else packed_factor)
        lora_b_factors.append(packed_factor.T if input_is_embed else embed_factor.T)
    return np.concatenate(lora_a_factors), np.concatenate(lora_b_factors, 1)


def from_peft(
    layer_weights: LayerWeights, first: np.ndarray, second: np.ndarray, model: Model
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Convert lora_A (rank, in) and lora_B (out, rank) to the decoder's factor pairs by path."""
    input_is_embed = embed_is_input(layer_weights.row.paths[0], model)
    rank_model = replace(model, embed=len(first))
    packed_factor = second.T if input_is_embed else first
    arrays = to_decoder(
        layer_weights, [np.moveaxis(packed_factor, 0, rank_axis(layer_weights, model))], rank_model
    )
    return {
        path: (first.T, array) if input_is_embed else (array, second.T)
        for path, array in zip(layer_weights.row.paths, arrays, strict=True)
    }
