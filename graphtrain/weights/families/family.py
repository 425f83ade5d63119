"""Family: how a family of Hugging Face says what the decoder's settings and arrays say.

Both directions come from one table. A row of weights is a pair of names and a pattern of einops,
Hugging Face's order of axes on its left and the decoder's on its right; the names of axes are the
settings that give their sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from einops import EinopsError, rearrange

from graphtrain.config.schema import Mixture, Model
from graphtrain.errors import WeightsError
from graphtrain.models.shapes import parameter_arrays

Config = Mapping[str, Any]  # config.json
SAME = ""  # the pattern of arrays that need none


class Setting(Protocol):
    """One thing that a config.json says."""

    def read(self, config: Config) -> dict[str, Any]:
        """As settings of a Model."""
        ...

    def write(self, model: Model) -> dict[str, Any]:
        """As entries of a config.json."""
        ...


@dataclass(frozen=True)
class Row:
    """Tensors of Hugging Face that hold the same numbers as arrays of the decoder."""

    name: str  # Hugging Face's; {layer} stands for each, {expert} for all of a layer together
    paths: tuple[str, ...]  # the decoder's; several where Hugging Face packs them into one
    pattern: str = SAME  # packed arrays come out behind one another along the first axis
    divide: Callable[[np.ndarray, Model], list[np.ndarray]] | None = None  # the first axis, uneven
    join: Callable[[Sequence[np.ndarray], Model], np.ndarray] | None = None  # what divide was given


@dataclass(frozen=True)
class Piece:
    """A row, of one layer."""

    row: Row
    layer: int | None  # None: outside of the layers
    names: tuple[str, ...]  # several: one for each expert


@dataclass(frozen=True)
class Family:
    """The tables of a family."""

    model_type: str  # in config.json
    architecture: str  # the class that transformers loads it with
    settings: tuple[Setting, ...]
    rows: tuple[Row, ...]
    always: Mapping[str, Any] = field(default_factory=dict)  # settings that no config.json says
    prefix: str = ""  # of names that some checkpoints leave out
    without_weights: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)  # buffers, as expressions

    def model(self, config: Config) -> Model:
        """What a config.json describes.

        Raises:
            WeightsError: something the decoder does not do, or a setting without a value.
        """
        settings = dict(self.always)
        for setting in self.settings:
            settings |= setting.read(config)
        try:
            return Model(**settings)
        except ValueError as error:
            raise WeightsError(f"config.json describes no model: {error}") from error

    def config(self, model: Model) -> dict[str, Any]:
        """The config.json that describes a model."""
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
        }
        for setting in self.settings:
            config |= setting.write(model)
        return config

    def expresses(self, model: Model) -> bool:
        """Whether config.json can say all of a model."""
        try:
            return mathematics(self.model(self.config(model))) == mathematics(model)
        except WeightsError:
            return False

    def pieces(self, model: Model) -> Iterator[Piece]:
        """All that a checkpoint of the model holds, row by row.

        Raises:
            WeightsError: the model has arrays that are in no row.
        """
        arrays = parameter_arrays(model)
        rows = [row for row in self.rows if row.paths[0] in arrays]
        if left := set(arrays) - {path for row in rows for path in row.paths}:
            raise WeightsError(
                f"{self.model_type} has no name for {', '.join(sorted(left))}; "
                "its models are of other settings"
            )
        for row in rows:
            layers = range(model.layers) if "{layer}" in row.name else [None]
            for layer in layers:
                yield Piece(row, layer, _names(row, layer, model))


def to_decoder(piece: Piece, tensors: Sequence[np.ndarray], model: Model) -> list[np.ndarray]:
    """The decoder's arrays of a piece, in the order of its paths; views where they can be.

    Raises:
        WeightsError: a tensor is of another shape than the model's.
    """
    row = piece.row
    given = tensors[0] if "{expert}" not in row.name else np.stack(tensors)
    moved = _move(piece, given, row.pattern, model)
    if row.divide is not None:
        arrays = row.divide(moved, model)
    else:
        arrays = [moved] if len(row.paths) == 1 else list(moved)
    for path, array in zip(row.paths, arrays, strict=True):
        want = array_shape(path, model)
        if array.shape != want:
            raise WeightsError(
                f"{piece.names[0]} has the shape {tensors[0].shape}, so {path} would have "
                f"{array.shape}, but config.json makes it {want}"
            )
    return arrays


def to_hugging_face(
    piece: Piece, arrays: Sequence[np.ndarray], model: Model
) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors of a piece by name, from the decoder's arrays in the order of its paths."""
    row = piece.row
    if row.join is not None:
        joined = row.join(arrays, model)
    else:
        joined = arrays[0] if len(arrays) == 1 else np.stack(arrays)
    left, _, right = row.pattern.partition(" -> ")
    moved = _move(piece, joined, f"{right} -> {left}" if row.pattern else SAME, model)
    if "{expert}" in row.name:
        yield from zip(piece.names, moved, strict=True)
    else:
        yield piece.names[0], moved


def array_shape(path: str, model: Model) -> tuple[int, ...]:
    """Of an array, of one layer where it is in the layers."""
    shape = parameter_arrays(model)[path].shape
    return shape[1:] if path.startswith("layers/") else shape


def mathematics(model: Model) -> Model:
    """Only the settings that say which function of its weights a model is."""
    every, mixture = model.full_every, model.mixture
    if mixture is not None:
        mixture = Mixture(
            experts=mixture.experts,
            per_token=mixture.per_token,
            normalise=mixture.normalise,
            shared=mixture.shared,
        )
    default = {item.name: item.default for item in Model.__dataclass_fields__.values()}
    how = ("dtype", "remat", "dropout", "initial_deviation")
    return replace(
        model,
        mixture=mixture,
        full_every=every if every and every <= model.layers else None,
        score_divisor=model.score_divisor or model.head_dim,
        **{name: default[name] for name in how},
    )


def _names(row: Row, layer: int | None, model: Model) -> tuple[str, ...]:
    if "{expert}" not in row.name:
        return (row.name.format(layer=layer),)
    assert model.mixture is not None
    return tuple(row.name.format(layer=layer, expert=i) for i in range(model.mixture.experts))


def _move(piece: Piece, array: np.ndarray, pattern: str, model: Model) -> np.ndarray:
    if not pattern:
        return array
    sizes = {
        name: size
        for name, size in _sizes(model).items()
        if re.search(rf"\b{name}\b", pattern) and size is not None
    }
    try:
        return rearrange(array, pattern, **sizes)
    except EinopsError as error:
        raise WeightsError(
            f"{piece.names[0]} has the shape {array.shape}, which is no {pattern} of {sizes}"
        ) from error


def _sizes(model: Model) -> dict[str, int | None]:
    assert model.kv_heads and model.head_dim
    return {
        "embed": model.embed,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "mlp": model.mlp,
        "slots": model.heads // model.kv_heads + 2,  # query heads of a group, its key and its value
        "two": 2,  # gate and up
        "three": 3,  # query, key and value
    }
