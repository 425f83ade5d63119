"""Array axes of a module's parameters, from their names, or from shapes for unknown names."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal

import torch

Axes = tuple[str | None, ...]

# Name components of projections that write to the residual stream.
_OUTPUT_PROJECTION = re.compile(
    r"(^|[._])(o|out|wo|back|down|dense|c_proj|output|proj_out|out_proj|o_proj)$"
)


@dataclass(frozen=True)
class NamedAxes:
    """The axes of a parameter, and the source of that information."""

    axes: Axes
    source: Literal["settings", "name", "shape"]


@cache
def known_names() -> dict[str, tuple[str | None, ...]]:
    """Return axes by name pattern, from names.toml."""
    table = tomllib.loads(Path(__file__).with_name("names.toml").read_text())["weights"]
    return {pattern: tuple(axis or None for axis in axes) for pattern, axes in table.items()}


def name_axes(
    module: torch.nn.Module, vocab: int, axes_by_pattern: Mapping[str, Sequence[str]]
) -> dict[str, NamedAxes]:
    """Determine the axes of every parameter, by name.

    Args:
        module: on any device.
        vocab: vocabulary size, the rows of its embedding.
        axes_by_pattern: axes by name pattern from program.model.axes, which take precedence.
    """
    parameters = dict(module.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    embed = _residual_width(shapes, vocab)
    named: dict[str, NamedAxes] = {}
    for name, shape in shapes.items():
        override = next(
            (axes for pattern, axes in axes_by_pattern.items() if _matches(name, pattern)), None
        )
        if override is not None:
            named[name] = NamedAxes(tuple(axis or None for axis in override), "settings")
        elif not parameters[name].requires_grad:  # small, and any block may need all of it
            named[name] = NamedAxes((None,) * len(shape), "name")
        elif axes := _without_products(module, name, parameters[name]):
            named[name] = NamedAxes(axes, "name")
        else:
            named[name] = _by_name(module, name, shape) or _by_shape(
                name, shape, embed, vocab, shapes
            )
    return named


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _by_name(module: torch.nn.Module, name: str, shape: tuple[int, ...]) -> NamedAxes | None:
    owner, _, last = name.rpartition(".")
    # Stacked experts are bare parameters; other modules have a weight and a bias.
    stem = owner if last in ("weight", "bias") else name
    for pattern, axes in known_names().items():
        if not _matches(stem, pattern):
            continue
        if last == "bias":
            axes = axes[:1]
        elif type(module.get_submodule(owner)).__name__ == "Conv1D":
            axes = axes[::-1]
        if len(axes) == len(shape):
            return NamedAxes(axes, "name")
    return None


def _without_products(
    module: torch.nn.Module, name: str, parameter: torch.nn.Parameter
) -> Axes | None:
    """Return the axes of a parameter with dimensions that no matrix product has; None otherwise.

    Convolutions are split by channels; a kernel's positions are never split. Biases of experts,
    and decay rates as of Mamba's A_log, have several dimensions, but are no matrices: none of their
    axes is "embed", so that they are not decayed.
    """
    shape, owner, last = tuple(parameter.shape), *name.rpartition(".")[::2]
    inner = module.get_submodule(owner)
    if isinstance(inner, torch.nn.modules.conv._ConvNd):
        return ("embed", *(None,) * (len(shape) - 1)) if len(shape) > 1 else None
    is_vector = (
        last.endswith("bias")
        or last == "A_log"
        or getattr(parameter, "_no_weight_decay", False)
        or (last != "weight" and sum(size > 1 for size in shape) < 2)
    )
    if len(shape) < 2 or not is_vector:
        return None
    experts: Axes = ("experts",) if owner.endswith("experts") else (None,)
    return (*experts, *(None,) * (len(shape) - 1))


def _by_shape(
    name: str,
    shape: tuple[int, ...],
    embed: int,
    vocab: int,
    shapes: Mapping[str, tuple[int, ...]],
) -> NamedAxes:
    """Determine axes by shape: column-parallel into a block, row-parallel out of it.

    Source: Shoeybi et al. 2019, section 3, https://arxiv.org/abs/1909.08053
    """
    if len(shape) == 1:
        return NamedAxes((_vector_axis(name, shape[0], embed, vocab, shapes),), "shape")
    *leading, out, into = shape
    experts: Axes = ("experts",) * (len(leading) == 1) or (None,) * len(leading)
    back = _OUTPUT_PROJECTION.search(name.removesuffix(".weight")) is not None
    if vocab in (out, into) and not leading:
        axes: Axes = ("vocab", "embed") if out == vocab else ("embed", "vocab")
    elif out == embed and into == embed:
        axes = ("embed", "heads") if back else ("heads", "embed")
    elif into == embed:
        axes = ("mlp", "embed")
    elif out == embed:
        axes = ("embed", "mlp")
    else:  # not connected to the residual stream: the longer side is sharded at rest
        axes = ("embed", None) if out >= into else (None, "embed")
    axes = tuple(None if size == 1 else axis for axis, size in zip(axes, (out, into), strict=True))
    return NamedAxes((*experts, *axes), "shape")


def _vector_axis(
    name: str, size: int, embed: int, vocab: int, shapes: Mapping[str, tuple[int, ...]]
) -> str | None:
    """Return a vector's axis: a bias has its weight's output axis, a norm has "embed"."""
    weight = name.removesuffix(".bias") + ".weight"
    if name.endswith(".bias") and len(shapes.get(weight, ())) == 2:
        return _by_shape(weight, shapes[weight], embed, vocab, shapes).axes[0]
    return "embed" if size == embed else None


def _residual_width(shapes: Mapping[str, tuple[int, ...]], vocab: int) -> int:
    """Return the width of the residual stream, from the token embedding; 0 if there is none."""
    tables = [shape for shape in shapes.values() if len(shape) == 2 and vocab in shape]
    if not tables:
        return 0
    rows, columns = tables[0]
    return columns if rows == vocab else rows


def embed_width(parameters: Mapping[str, torch.Tensor], axes: Mapping[str, NamedAxes]) -> int:
    """Return the width of the residual stream; 0 if there is no token embedding.

    Args:
        parameters: Parameters of a module, by name.
        axes: Array axes of each.
    """
    for name, parameter in parameters.items():
        named = axes[name].axes
        if set(named) == {"vocab", "embed"}:
            return parameter.shape[named.index("embed")]
    return 0
