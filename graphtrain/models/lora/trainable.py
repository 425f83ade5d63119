"""Which arrays a program trains and which it keeps as they are; imports no JAX.

Without an adapter it trains all. With one, it trains what is to be trained whole and, for every
weight that is adapted, two thin ones: `lora_a` from the weight's input to the rank and `lora_b`
from there to its output. The others are frozen, those of the layers perhaps as codes and scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from graphtrain.config.schema import Adapter, Model, Program
from graphtrain.models.lora.quantize import block_of
from graphtrain.models.shapes import parameter_arrays
from sharding_rules.arrays import ArraySpec
from sharding_rules.errors import ShardingError
from sharding_rules.mesh import MeshShape
from sharding_rules.rules import Rules, matches

A, B = "lora_a", "lora_b"
CODES, SCALES = "codes", "scales"

Arrays = dict[str, ArraySpec]


def keeps_weights(program: Program) -> bool:
    """Whether some weights are an input that no step changes."""
    return program.adapter is not None or program.loss.kind == "preference"


def trained_arrays(program: Program) -> Arrays:
    """Arrays that have gradients and moments, by path.

    Raises:
        ShardingError: a pattern of the adapter names nothing that it can.
    """
    arrays, adapter = parameter_arrays(program.model), program.adapter
    if adapter is None:
        return arrays
    trained = {path: arrays[path] for path in whole_paths(program.model, adapter)}
    for path in adapted_paths(program.model, adapter):
        first, second = _thin(arrays[path], adapter.rank)
        trained |= {f"{path}/{A}": first, f"{path}/{B}": second}
    return trained


def frozen_arrays(program: Program, rules: Rules, mesh: MeshShape) -> Arrays:
    """Arrays that no step changes, by path: the rest of an adapter's base, or what DPO refers to.

    Raises:
        ShardingError: a pattern of the adapter names nothing that it can.
    """
    if not keeps_weights(program):
        return {}
    arrays, adapter = parameter_arrays(program.model), program.adapter
    if adapter is None:
        return {path: replace(spec, role="frozen") for path, spec in arrays.items()}
    # DPO refers to the weights as they were, so also to those that are trained whole.
    trained = () if program.loss.kind == "preference" else whole_paths(program.model, adapter)
    frozen: Arrays = {}
    for path, spec in arrays.items():
        if path not in trained:
            frozen |= _kept(path, replace(spec, role="frozen"), adapter, rules, mesh)
    return frozen


def adapted_paths(model: Model, adapter: Adapter) -> list[str]:
    """Weights that get an adapter.

    Raises:
        ShardingError: a pattern names none that can have one.
    """
    able = [path for path, spec in parameter_arrays(model).items() if _can_adapt(path, spec)]
    chosen = _matching(adapter.targets, able, "targets")
    whole = whole_paths(model, adapter)
    return [path for path in able if path in chosen and path not in whole]


def whole_paths(model: Model, adapter: Adapter) -> list[str]:
    """Arrays that are trained in full beside the adapters.

    Raises:
        ShardingError: a pattern names none.
    """
    arrays = parameter_arrays(model)
    chosen = _matching(adapter.whole, arrays, "whole")
    return [path for path in arrays if path in chosen]


def is_quantised(path: str, spec: ArraySpec, adapter: Adapter) -> bool:
    """Whether a frozen array is kept as codes and scales: matrices of the layers, no router."""
    few = adapter.base in ("int8", "nf4")
    return few and path.startswith("layers/") and _is_matrix(spec) and "routes" not in spec.axes


def is_rounded(path: str, spec: ArraySpec, adapter: Adapter) -> bool:
    """Whether a frozen array is kept in bfloat16: of a smaller base, what is not in few bits."""
    if adapter.base == "float32" or is_quantised(path, spec, adapter):
        return False
    return _is_matrix(spec) and "routes" not in spec.axes


def _is_matrix(spec: ArraySpec) -> bool:
    return "embed" in spec.axes and len([axis for axis in spec.axes if axis != "layers"]) > 1


def _can_adapt(path: str, spec: ArraySpec) -> bool:
    """Experts multiply tokens in runs of their own, and a router only chooses."""
    return (
        path.startswith("layers/")
        and _is_matrix(spec)
        and not {"experts", "routes"} & set(spec.axes)
    )


def _matching(patterns: Iterable[str], paths: Iterable[str], setting: str) -> set[str]:
    paths, found = list(paths), set()
    for pattern in patterns:
        named = {path for path in paths if matches(path, pattern)}
        if not named:
            raise ShardingError(
                f"program.adapter.{setting}: {pattern!r} names none of the arrays that can be; "
                f"they are {', '.join(paths)}"
            )
        found |= named
    return found


def _thin(spec: ArraySpec, rank: int) -> tuple[ArraySpec, ArraySpec]:
    """The two factors of an adapter; embed is the first axis of an input, the last of an output."""
    cut = 2 if spec.axes[1] == "embed" else len(spec.axes) - 1
    first = ArraySpec((*spec.shape[:cut], rank), (*spec.axes[:cut], "rank"))
    second = ArraySpec(
        (spec.shape[0], rank, *spec.shape[cut:]), (spec.axes[0], "rank", *spec.axes[cut:])
    )
    return first, second


def _kept(path: str, spec: ArraySpec, adapter: Adapter, rules: Rules, mesh: MeshShape) -> Arrays:
    if is_rounded(path, spec, adapter):
        return {path: replace(spec, dtype="bfloat16")}
    if not is_quantised(path, spec, adapter):
        return {path: spec}
    size, axis = spec.shape[-1], spec.axes[-1]
    pair = 2 if adapter.base == "nf4" else 1
    if size % pair:
        raise ShardingError(
            f"{path}: nf4 keeps pairs, and the last axis {axis!r} has size {size}, which is odd; "
            'set program.adapter.base = "int8"'
        )
    shards = mesh.size(tuple(name for name in rules.of("frozen", path).get(axis or "", ())))

    def part(count: int, dtype: str) -> ArraySpec:
        """With as many on the last axis; where that is not to be split evenly, all have them."""
        last = axis if count % shards == 0 else None
        shape, axes = (*spec.shape[:-1], count), (*spec.axes[:-1], last)
        return replace(spec, shape=shape, axes=axes, dtype=dtype)

    codes = part(size // pair, "uint8" if pair == 2 else "int8")
    return {f"{path}/{CODES}": codes, f"{path}/{SCALES}": part(size // block_of(size), "float32")}


def count_of(arrays: Mapping[str, ArraySpec]) -> int:
    """Numbers in arrays, a pair of codes in a byte as two and scales as none."""
    return sum(
        math.prod(spec.shape) * (2 if spec.dtype == "uint8" else 1)
        for path, spec in arrays.items()
        if not path.endswith(f"/{SCALES}")
    )
