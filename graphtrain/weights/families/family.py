"""Family: mapping of a Hugging Face family's settings and tensors to the native decoder's.

One table serves both directions. A row of weights is a pair of names and an einops pattern, with
Hugging Face's order of axes on the left and the decoder's on the right; axes are named after the
settings that specify their sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np
from einops import EinopsError, rearrange
from pydantic import ValidationError

from graphtrain.config.schema import MixtureOfExperts, Model
from graphtrain.errors import WeightsError
from graphtrain.files import first_problem
from graphtrain.models.flops import value_head_dim
from graphtrain.models.shapes import parameter_arrays

Config = Mapping[str, Any]  # config.json
IDENTITY_PATTERN = ""  # pattern of arrays with the same axes on both sides


class SettingMapping(Protocol):
    """Mapping between entries of config.json and settings of a Model."""

    def read(self, config: Config) -> dict[str, Any]:
        """Return the settings of a Model that `config` specifies."""
        ...

    def write(self, model: Model) -> dict[str, Any]:
        """Return the entries of config.json that describe `model`."""
        ...


@dataclass(frozen=True)
class WeightMapping:
    """Mapping between tensors of Hugging Face and arrays of the decoder with the same values."""

    # Hugging Face's; {layer} for one layer, {expert} for all experts of a layer, {dense} for all
    # dense layers before those of a mixture, {ahead} for the block of multi-token prediction.
    name: str
    paths: tuple[str, ...]  # the decoder's; several if Hugging Face packs them into one tensor
    pattern: str = (
        IDENTITY_PATTERN  # einops; packed arrays are stacked along the first axis of the result
    )
    split: Callable[[np.ndarray, Model], list[np.ndarray]] | None = (
        None  # splits the first axis unevenly
    )
    merge: Callable[[Sequence[np.ndarray], Model], np.ndarray] | None = None  # inverse of split


@dataclass(frozen=True)
class LayerWeights:
    """Row of weights for one layer, or outside the layers."""

    row: WeightMapping
    layer: int | None  # None: outside the layers
    names: tuple[str, ...]  # tensor names; several: one for each expert, or dense layer


@dataclass(frozen=True)
class Family:
    """Tables of settings and weights of one Hugging Face family."""

    model_type: str  # in config.json
    architecture: str  # class name in transformers
    settings: tuple[SettingMapping, ...]
    mappings: tuple[WeightMapping, ...]
    fixed_settings: Mapping[str, Any] = field(
        default_factory=dict
    )  # settings implied by the family, absent from config.json
    prefix: str = ""  # prefix of tensor names that some checkpoints omit
    ignored_tensors: tuple[str, ...] = (
        r".*\.rotary_emb\.inv_freq",
    )  # regular expressions of buffers to ignore

    def model_from_config(self, config: Config) -> Model:
        """Return the model that a config.json describes.

        Raises:
            WeightsError: the decoder does not support a setting, or a required one is missing.
        """
        settings = dict(self.fixed_settings)
        try:
            for setting in self.settings:
                settings |= setting.read(config)
            return Model(**settings)
        except KeyError as error:
            raise WeightsError(f"config.json: {error} is missing") from error
        except (ValueError, TypeError, AttributeError) as error:  # also entries of other types
            reason = first_problem(error) if isinstance(error, ValidationError) else error
            raise WeightsError(f"config.json does not describe a valid model: {reason}") from error

    def config_from_model(self, model: Model) -> dict[str, Any]:
        """Return the contents of a config.json that describes a model."""
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
        }
        for setting in self.settings:
            config |= setting.write(model)
        return config

    def supports(self, model: Model) -> bool:
        """Return whether config.json can express every setting of a model."""
        try:
            return functional_settings(
                self.model_from_config(self.config_from_model(model))
            ) == functional_settings(model)
        except WeightsError:
            return False

    def unmapped_arrays(self, model: Model) -> list[str]:
        """Return the paths of arrays of a model for which the family has no row, sorted."""
        arrays = parameter_arrays(model)
        rows = [row for row in self.mappings if row.paths[0] in arrays]
        return sorted(set(arrays) - {path for row in rows for path in row.paths})

    def weights(self, model: Model) -> Iterator[LayerWeights]:
        """Yield every row of weights of the model, for every layer.

        Raises:
            WeightsError: the model has arrays for which the family has no row.
        """
        if unmapped := self.unmapped_arrays(model):
            raise WeightsError(
                f"{self.model_type} models have no tensor for {', '.join(unmapped)}; "
                "[program.model] has settings that this family does not support"
            )
        arrays = parameter_arrays(model)
        for row in (row for row in self.mappings if row.paths[0] in arrays):
            layers = range(model.layers) if "{layer}" in row.name else [None]
            for layer in layers:
                yield LayerWeights(row, layer, _names(row, layer, model))


def to_decoder(
    layer_weights: LayerWeights, tensors: Sequence[np.ndarray], model: Model
) -> list[np.ndarray]:
    """Convert Hugging Face's tensors of one row to the decoder's arrays, as views if possible.

    Returns:
        One array for each path of the row, in order.

    Raises:
        WeightsError: the shape of a tensor does not match the model.
    """
    row = layer_weights.row
    tensor = np.stack(tensors) if is_stacked(row) else tensors[0]
    rearranged = _rearrange(layer_weights, tensor, row.pattern, model)
    if row.split is not None:
        arrays = row.split(rearranged, model)
    else:
        arrays = [rearranged] if len(row.paths) == 1 else list(rearranged)
    for path, array in zip(row.paths, arrays, strict=True):
        expected_shape = array_shape(path, model)
        if array.shape != expected_shape:
            raise WeightsError(
                f"{layer_weights.names[0]} has shape {tensors[0].shape}, so {path} would have "
                f"{array.shape}, but config.json implies {expected_shape}"
            )
    return arrays


def to_hugging_face(
    layer_weights: LayerWeights, arrays: Sequence[np.ndarray], model: Model
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and tensors of one row, from the decoder's arrays in the order of its paths."""
    row = layer_weights.row
    if row.merge is not None:
        joined = row.merge(arrays, model)
    else:
        joined = arrays[0] if len(arrays) == 1 else np.stack(arrays)
    left, _, right = row.pattern.partition(" -> ")
    rearranged = _rearrange(
        layer_weights, joined, f"{right} -> {left}" if row.pattern else IDENTITY_PATTERN, model
    )
    if is_stacked(layer_weights.row):
        yield from zip(layer_weights.names, rearranged, strict=True)
    else:
        yield layer_weights.names[0], rearranged


def array_shape(path: str, model: Model) -> tuple[int, ...]:
    """Return the shape of an array; for an array in the layers, that of one layer."""
    shape = parameter_arrays(model)[path].shape
    return shape[1:] if path.startswith("layers/") else shape


def functional_settings(model: Model) -> Model:
    """Return the model with only the settings that affect its output; others are defaults."""
    every, mixture = model.global_attention_every, model.moe
    if mixture is not None:
        training = ("capacity_factor", "balance_loss", "router_z_loss")
        defaults = {item.name: item.default for item in fields(MixtureOfExperts)}
        mixture = replace(mixture, **{name: defaults[name] for name in training})
        if mixture.bias_update_rate is not None:
            mixture = replace(mixture, bias_update_rate=0.0)
    default = {item.name: item.default for item in Model.__dataclass_fields__.values()}
    non_functional = ("dtype", "remat", "dropout", "init_std", "mtp_loss_weight")
    return replace(
        model,
        moe=mixture,
        global_attention_every=every if every and every <= model.layers else None,
        query_pre_attn_scalar=model.query_pre_attn_scalar or model.head_dim,
        **{name: default[name] for name in non_functional},
    )


def is_stacked(row: WeightMapping) -> bool:
    """Return whether a row stacks several tensors of Hugging Face in one array."""
    return "{expert}" in row.name or "{dense}" in row.name


def with_dense_layers(rows: Sequence[WeightMapping]) -> tuple[WeightMapping, ...]:
    """Return rows of layers, and the same of the dense layers before those of a mixture.

    Rows of several paths split the last axis, and patterns have no sizes of a mixture.
    """

    def dense(row: WeightMapping) -> WeightMapping:
        left, _, right = row.pattern.partition(" -> ")
        return replace(
            row,
            name=row.name.replace("{layer}", "{dense}"),
            paths=tuple(path.replace("layers/", "dense_layers/", 1) for path in row.paths),
            pattern=f"dense_layers {left} -> dense_layers {right}" if left else IDENTITY_PATTERN,
        )

    return (*rows, *map(dense, rows))


def ahead_rows(rows: Sequence[WeightMapping]) -> tuple[WeightMapping, ...]:
    """Return rows of a layer as those of the block of multi-token prediction."""
    return tuple(
        replace(
            row,
            name=row.name.replace("{layer}", "{ahead}"),
            paths=tuple(path.replace("layers/", "ahead/block/", 1) for path in row.paths),
        )
        for row in rows
        if "{layer}" in row.name
    )


def _names(row: WeightMapping, layer: int | None, model: Model) -> tuple[str, ...]:
    if "{dense}" in row.name:
        return tuple(row.name.format(dense=index) for index in range(model.dense_layers))
    if layer is not None:
        layer += model.dense_layers
    places = {"layer": layer, "ahead": model.depth}
    if "{expert}" not in row.name:
        return (row.name.format(**places),)
    assert model.moe is not None
    return tuple(row.name.format(**places, expert=i) for i in range(model.moe.experts))


def _rearrange(
    layer_weights: LayerWeights, array: np.ndarray, pattern: str, model: Model
) -> np.ndarray:
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
            f"{layer_weights.names[0]} has shape {array.shape}, which does not match the axes "
            f"{pattern} with sizes {sizes}"
        ) from error


def _sizes(model: Model) -> dict[str, int | None]:
    assert model.kv_heads and model.head_dim
    return {
        "embed": model.embed,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "mlp": model.mlp,
        "slots": model.heads // model.kv_heads
        + 2,  # per group: query heads, one key and one value head
        "two": 2,  # gate and up
        "three": 3,  # query, key and value
        "v_head_dim": value_head_dim(model),
    }
