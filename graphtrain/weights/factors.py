"""An adapter's two factors, from the decoder's axes and names to Hugging Face's and back.

Every adapted weight has the axis embed on one side. With the rank in embed's place, the other
factor is what the weight is to its family's table, so the table says how it is turned, packed and
named. Where Hugging Face packs several weights into one, PEFT has one pair of factors for all:
ours side by side, each with zeros for the others' outputs, so exact, in a rank as many times ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from graphtrain.config.schema import Adapter, Model
from graphtrain.models.lora.trainable import fully_trained_paths, lora_paths
from graphtrain.weights.convert import read_config, without_padding
from graphtrain.weights.families import Family, family_for, family_of
from graphtrain.weights.families.family import Piece, array_shape, to_decoder, to_hugging_face

EMBEDDING = "embedding/tokens"


@dataclass(frozen=True)
class Table:
    """A family's names for what an adapter trains."""

    family: Family
    model: Model
    adapter: Adapter
    targets: frozenset[str]
    whole: frozenset[str]

    @classmethod
    def of(cls, side: Path, model: Model, adapter: Adapter) -> Table:
        config = read_config(side) if (side / "config.json").is_file() else None
        family = family_of(config) if config else family_for(model)
        targets = frozenset(lora_paths(model, adapter))
        whole = frozenset(fully_trained_paths(model, adapter))
        return cls(family, without_padding(model, config), adapter, targets, whole)

    @property
    def tied_head(self) -> str | None:
        """The head's name where it is the embedding, trained whole. PEFT would tie only those of
        some names to its copy of an embedding, so the head has a copy of its own in a folder."""
        if not (self.model.tied_head and EMBEDDING in self.whole):
            return None
        rows = (row.name for row in self.family.rows if row.paths == ("head",))
        return next(rows, "lm_head.weight")

    def adapted(self) -> Iterator[Piece]:
        for piece in self.family.pieces(self.model):
            if self.targets & set(piece.row.paths):
                yield piece

    def saved(self) -> Iterator[Piece]:
        for piece in self.family.pieces(self.model):
            if self.whole & set(piece.row.paths):
                yield piece


def module_of(piece: Piece) -> str:
    return piece.names[0].removesuffix(".weight")


def embed_is_input(path: str, model: Model) -> bool:
    return array_shape(path, replace(model, embed=1))[0] == 1


def rank_axis(piece: Piece, model: Model) -> int:
    """Where embed is in Hugging Face's tensor; the other axis is all that is not embed."""
    return _shape(piece, replace(model, embed=1)).index(1)


def peft_shapes(piece: Piece, rank: int, model: Model) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """PEFT's (rank, in) and (out, rank) of a piece."""
    other = max(_shape(piece, replace(model, embed=1)))
    inward = embed_is_input(piece.row.paths[0], model)
    into, out = (model.embed, other) if inward else (other, model.embed)
    return (rank, into), (out, rank)


def _shape(piece: Piece, model: Model) -> tuple[int, ...]:
    empty = [np.zeros(array_shape(path, model), np.int8) for path in piece.row.paths]
    ((_, tensor),) = to_hugging_face(piece, empty, model)
    return tensor.shape


def to_peft(
    piece: Piece, pairs: dict[str, tuple[np.ndarray, np.ndarray]], model: Model
) -> tuple[np.ndarray, np.ndarray]:
    """PEFT's (rank, in) and (out, rank), of ours by path."""
    axis, firsts, seconds = rank_axis(piece, model), [], []
    for path, (first, second) in pairs.items():
        inward = embed_is_input(path, model)
        like_weight, plain = (second, first) if inward else (first, second)
        rank = plain.shape[1] if inward else plain.shape[0]
        thin = replace(model, embed=rank)
        arrays = [
            like_weight if other == path else np.zeros(array_shape(other, thin), np.float32)
            for other in piece.row.paths
        ]
        ((_, tensor),) = to_hugging_face(piece, arrays, thin)
        wide = np.moveaxis(tensor, axis, 0)  # (rank, in or out)
        firsts.append(plain.T if inward else wide)
        seconds.append(wide.T if inward else plain.T)
    return np.concatenate(firsts), np.concatenate(seconds, 1)


def from_peft(
    piece: Piece, first: np.ndarray, second: np.ndarray, model: Model
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Ours by path, of PEFT's (rank, in) and (out, rank)."""
    inward = embed_is_input(piece.row.paths[0], model)
    thin = replace(model, embed=len(first))
    wide = second.T if inward else first
    arrays = to_decoder(piece, [np.moveaxis(wide, 0, rank_axis(piece, model))], thin)
    return {
        path: (first.T, array) if inward else (array, second.T)
        for path, array in zip(piece.row.paths, arrays, strict=True)
    }
