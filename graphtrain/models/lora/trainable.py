"""Trainable and frozen arrays of a program; imports no JAX.

Without an adapter all arrays are trained. With LoRA, the arrays named by `adapter.modules_to_save`
are trained in full, and every adapted weight has two trainable factors: `lora_a` from the weight's
input to the rank, and `lora_b` from the rank to its output. All other arrays are frozen; frozen
matrices of the layers may be stored quantized, as codes and scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Adapter, Model, Program
from graphtrain.models.lora.quantize import QuantizationKind, block_size
from graphtrain.models.matrices import matrix_axes
from graphtrain.models.shapes import STACKS, head_path, parameter_arrays
from sharding_rules.arrays import ArraySpec
from sharding_rules.errors import ShardingError
from sharding_rules.rules import matches

LORA_A, LORA_B = "lora_a", "lora_b"
CODES, SCALES = "codes", "scales"
ALL = "*"  # of target_modules
ADAPTERS = "adapters"  # factors beside the base, in the tree of served weights
_INPUTS = ("embed", "q_lora", "kv_lora")  # a matrix that begins with one of them multiplies it

Arrays = dict[str, ArraySpec]


def has_frozen_weights(program: Program) -> bool:
    """Return whether the program has frozen weights, as an input that no step changes."""
    return program.adapter is not None or program.loss.kind == "dpo"


def trained_arrays(program: Program) -> Arrays:
    """Return the arrays that have gradients and optimizer state, by path.

    Raises:
        ShardingError: a pattern of the adapter matches no eligible array.
    """
    arrays, adapter = parameter_arrays(program.model), program.adapter
    if adapter is None:
        return arrays
    trained = {path: arrays[path] for path in fully_trained_paths(program.model, adapter)}
    for path in lora_paths(program.model, adapter):
        first, second = _lora_factors(arrays[path], adapter.rank)
        trained |= {f"{path}/{LORA_A}": first, f"{path}/{LORA_B}": second}
    return trained


def frozen_arrays(program: ResolvedProgram) -> Arrays:
    """Return the frozen arrays by path: the base weights of LoRA, or DPO's reference model.

    Raises:
        ShardingError: a pattern of the adapter matches no eligible array, or the last axis of an
            nf4 array is odd.
    """
    if not has_frozen_weights(program.settings):
        return {}
    arrays, adapter = parameter_arrays(program.model), program.adapter
    if adapter is None:
        return {path: replace(spec, role="frozen") for path, spec in arrays.items()}
    # DPO's reference model also needs the initial values of arrays that are trained in full.
    trained = () if program.loss.kind == "dpo" else fully_trained_paths(program.model, adapter)
    frozen: Arrays = {}
    for path, spec in arrays.items():
        if path not in trained:
            frozen |= _stored_form(path, replace(spec, role="frozen"), adapter, program)
    return frozen


def lora_paths(model: Model, adapter: Adapter) -> list[str]:
    """Return the paths of the weights that have LoRA factors.

    Raises:
        ShardingError: a pattern matches no weight that can have them, or experts would have
            dropout.
    """
    fully_trained = fully_trained_paths(model, adapter)
    targets = _adaptable_paths(model, adapter.target_modules, "adapter.target_modules")
    paths = [path for path in targets if path not in fully_trained]
    if adapter.dropout and (experts := [path for path in paths if is_of_experts(model, path)]):
        raise ShardingError(
            f"program.adapter.dropout = {adapter.dropout} applies to the input of a matrix, and "
            f"{experts[0]} has one per expert, for which PEFT has no dropout either; set "
            "dropout = 0, or leave the experts out of target_modules"
        )
    return paths


def served_adapter_arrays(program: Program) -> Arrays:
    """Return the LoRA factors of all adapters that are served beside the base, by path.

    The ranks of one adapter lie beside those of the others. The scale is part of `lora_b`.

    Raises:
        ShardingError: a pattern matches no weight that can have them.
    """
    serve, arrays = program.serve, {}
    if not serve.total_adapter_rank:
        return {}
    specs, patterns = parameter_arrays(program.model), serve.adapter_target_modules
    setting = "serve.adapter_target_modules"
    for path in _adaptable_paths(program.model, patterns, setting, served=True):
        first, second = _lora_factors(specs[path], serve.total_adapter_rank)
        arrays |= {f"{path}/{LORA_A}": first, f"{path}/{LORA_B}": second}
    return arrays


def _adaptable_paths(
    model: Model, patterns: Iterable[str], setting: str, *, served: bool = False
) -> list[str]:
    """Return the paths of the weights that match a pattern and can have LoRA factors.

    The pattern "*" alone matches all but experts, as "all-linear" of PEFT.

    Args:
        model: Settings of the model.
        patterns: Names or globs.
        setting: Name of the setting that has the patterns.
        served: Return only weights that a server adapts by name; see can_serve.
    """
    eligible = [
        path
        for path, spec in parameter_arrays(model).items()
        if _can_adapt(path, spec) and (not served or can_serve(model, path))
    ]
    chosen = matching_paths([one for one in patterns if one != ALL], eligible, setting)
    if ALL in patterns:
        chosen |= {path for path in eligible if not is_of_experts(model, path)}
    return [path for path in eligible if path in chosen]


def is_of_experts(model: Model, path: str) -> bool:
    """Return whether a weight is a matrix of each expert of a mixture."""
    return _is_of_experts(parameter_arrays(model)[path])


def can_serve(model: Model, path: str) -> bool:
    """Return whether a server can have factors of a weight beside those of other adapters.

    It has none of experts, of dense layers before a mixture, and of what multiplies a latent, which
    decoding computes in another order.
    """
    spec = parameter_arrays(model)[path]
    return path.startswith("layers/") and "embed" in spec.axes and not _is_of_experts(spec)


def fully_trained_paths(model: Model, adapter: Adapter) -> list[str]:
    """Return the paths of the arrays that are trained in full beside LoRA.

    Raises:
        ShardingError: a pattern matches no array.
    """
    arrays = parameter_arrays(model)
    chosen = matching_paths(adapter.modules_to_save, arrays, "adapter.modules_to_save")
    return [path for path in arrays if path in chosen]


def trains_head(program: Program) -> bool:
    """Return whether the weights of the LM head, or of an embedding that is also it, are trained.

    Raises:
        ShardingError: a pattern of the adapter matches no array.
    """
    head = head_path(program.model)
    adapter = program.adapter
    return adapter is None or head in fully_trained_paths(program.model, adapter)


def is_quantized(path: str, spec: ArraySpec, adapter: Adapter) -> bool:
    """Return whether a frozen array is stored quantized: matrices of layers, except routers."""
    is_quantized_dtype = adapter.base_dtype in ("int8", "nf4")
    return (
        is_quantized_dtype
        and _is_in_layers(path)
        and _is_matrix(spec)
        and "router" not in spec.axes
    )


def is_bfloat16(path: str, spec: ArraySpec, adapter: Adapter) -> bool:
    """Return whether a frozen array is stored in bfloat16.

    These are the matrices that are not quantized, except routers, unless the base is float32.
    """
    if adapter.base_dtype == "float32" or is_quantized(path, spec, adapter):
        return False
    return _is_matrix(spec) and "router" not in spec.axes


def _is_matrix(spec: ArraySpec) -> bool:
    """Return whether an array is a matrix, or a stack of them; biases of experts are vectors."""
    return matrix_axes(spec) is not None


def _can_adapt(path: str, spec: ArraySpec) -> bool:
    """Return whether a weight can have LoRA factors: a matrix of the layers, not the router."""
    return _is_in_layers(path) and _is_matrix(spec) and "router" not in spec.axes


def _is_in_layers(path: str) -> bool:
    """Return whether an array is one of the layers, also of dense ones before a mixture."""
    return path.startswith(tuple(f"{stack}/" for stack in STACKS))


def _is_of_experts(spec: ArraySpec) -> bool:
    return "experts" in spec.axes


def matching_paths(patterns: Iterable[str], paths: Iterable[str], setting: str) -> set[str]:
    """Return the paths that match a pattern.

    Raises:
        ShardingError: a pattern matches none.
    """
    paths, matched = list(paths), set()
    for pattern in patterns:
        matching_paths = {path for path in paths if matches(path, pattern)}
        if not matching_paths:
            raise ShardingError(
                f"program.{setting}: {pattern!r} matches no eligible array; "
                f"choose from {', '.join(paths)}"
            )
        matched |= matching_paths
    return matched


def _lora_factors(spec: ArraySpec, rank: int) -> tuple[ArraySpec, ArraySpec]:
    """Return the specs of a weight's two LoRA factors; each expert has both.

    An input projection begins with the axis that it multiplies, embed or a latent; an output
    projection ends with embed, and multiplies all axes before it.
    """
    lead = 2 if _is_of_experts(spec) else 1
    inputs = lead + 1 if spec.axes[lead] in _INPUTS else len(spec.axes) - 1
    first = ArraySpec((*spec.shape[:inputs], rank), (*spec.axes[:inputs], "rank"))
    second = ArraySpec(
        (*spec.shape[:lead], rank, *spec.shape[inputs:]),
        (*spec.axes[:lead], "rank", *spec.axes[inputs:]),
    )
    return first, second


def _stored_form(path: str, spec: ArraySpec, adapter: Adapter, program: ResolvedProgram) -> Arrays:
    """Return the arrays that store a frozen array: itself, in bfloat16, or as codes and scales."""
    if is_bfloat16(path, spec, adapter):
        return {path: replace(spec, dtype="bfloat16")}
    if not is_quantized(path, spec, adapter):
        return {path: spec}
    assert adapter.base_dtype in ("int8", "nf4")
    return quantized_form(path, spec, adapter.base_dtype, program)


def quantized_form(
    path: str, spec: ArraySpec, kind: QuantizationKind, program: ResolvedProgram
) -> Arrays:
    """Return the codes and scales of a quantized frozen array, by path.

    Raises:
        ShardingError: the last axis of an nf4 array is odd.
    """
    size, axis = spec.shape[-1], spec.axes[-1]
    pair = 2 if kind == "nf4" else 1
    if size % pair:
        raise ShardingError(
            f"{path}: nf4 stores two codes per byte, and the last axis {axis!r} has size {size}, "
            'which is odd; set program.adapter.base_dtype = "int8"'
        )
    shards = program.mesh.size(program.rules.table_for("frozen", path).get(axis or "", ()))

    def with_last_dim(count: int, dtype: str) -> ArraySpec:
        """Return a spec with `count` elements on the last axis, replicated if shards are uneven."""
        last = axis if count % shards == 0 else None
        shape, axes = (*spec.shape[:-1], count), (*spec.axes[:-1], last)
        return replace(spec, shape=shape, axes=axes, dtype=dtype)

    codes = with_last_dim(size // pair, "uint8" if pair == 2 else "int8")
    return {
        f"{path}/{CODES}": codes,
        f"{path}/{SCALES}": with_last_dim(size // block_size(size), "float32"),
    }


def weight_path(path: str) -> str:
    """Return the path of the weight to which a factor, codes or scales belong; else the path."""
    stem, _, name = path.rpartition("/")
    return stem if name in (LORA_A, LORA_B, CODES, SCALES) else path


def weight_count(arrays: Mapping[str, ArraySpec]) -> int:
    """Return the number of weights in arrays: two per byte of nf4 codes, none per scale."""
    return sum(
        math.prod(spec.shape) * (2 if spec.dtype == "uint8" else 1)
        for path, spec in arrays.items()
        if not path.endswith(f"/{SCALES}")
    )
