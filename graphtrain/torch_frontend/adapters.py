"""LoRA on an imported model: which parameters are adapted, and how frozen ones are stored.

Factors have the shapes of PEFT: `lora_a` (rank, in) and `lora_b` (out, rank), for stacked experts
one of each per expert, with a leading axis of layers in a stack of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import torch

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Adapter, Program
from graphtrain.errors import ImportedModelError
from graphtrain.models.lora.layers import QuantizedWeight
from graphtrain.models.lora.trainable import (
    ALL,
    CODES,
    LORA_A,
    LORA_B,
    SCALES,
    Arrays,
    matching_paths,
    quantized_form,
)
from graphtrain.torch_frontend.adapted_parameter import AdaptedParameter, Parameter
from graphtrain.torch_frontend.model import OpenedModel
from lowering.trees import Tree, flatten, unflatten
from sharding_rules.arrays import ArraySpec
from sharding_rules.errors import ShardingError
from sharding_rules.rules import matches

# Layers that PEFT adapts beside linear ones.
_OTHERS_OF_PEFT = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.Embedding)


def adaptable_orders(opened: OpenedModel) -> dict[str, str]:
    """Return the parameters that can have LoRA factors: the order of their axes, by path.

    The axes are o (output), i (input) and e (experts): "oi" of torch.nn.Linear, "io" of Conv1D,
    "eoi" or "eio" of stacked experts. The LM head is not among them.

    Raises:
        ImportedModelError: the strict front end is used.
    """
    if opened.strict:
        raise ImportedModelError(
            "program.adapter is not supported with the strict front end (used because "
            f"{opened.strict}); remove [program.adapter], or train all weights"
        )
    names, orders = opened.parameter_names_by_path(), {}
    for path, spec in opened.specs().items():
        if spec.role != "parameter" or "vocab" in spec.axes:
            continue
        owner, _, last = names[path][0].rpartition(".")
        order = _order(opened.meta.module.get_submodule(owner), last, spec, opened.is_stacked(path))
        if order:
            orders[path] = order
    return orders


def _order(module: torch.nn.Module, name: str, spec: ArraySpec, is_stacked: bool) -> str:
    """Return the order of a parameter's axes in a layer; empty if it cannot have factors."""
    if name == "weight" and isinstance(module, torch.nn.Linear):
        return "oi"
    if name == "weight" and type(module).__name__ == "Conv1D":  # of transformers
        return "io"
    if "experts" in spec.axes and len(spec.shape) - is_stacked == 3:
        # As in ParamWrapper of PEFT.
        return "eio" if getattr(module, "is_transposed", False) else "eoi"
    return ""


def lora_orders(opened: OpenedModel, adapter: Adapter) -> dict[str, str]:
    """Return the parameters that have LoRA factors: the order of their axes, by path.

    Raises:
        ImportedModelError: experts are adapted, and adapter.dropout is set.
        ShardingError: a pattern matches no parameter that can have them, or the name of a
            convolution or an embedding beside others.
    """
    orders, saved = adaptable_orders(opened), fully_trained_paths(opened, adapter)
    eligible = {path.removesuffix("/weight"): path for path in orders}
    linear = {name for name, path in eligible.items() if "e" not in orders[path]}
    chosen = linear if ALL in adapter.target_modules else set()  # as "all-linear" of PEFT
    patterns = [pattern for pattern in adapter.target_modules if pattern != ALL]
    _refuse_other_layers(opened, patterns, eligible)
    chosen = chosen | matching_paths(patterns, eligible, "adapter.target_modules")
    found = {eligible[name]: orders[eligible[name]] for name in eligible if name in chosen}
    found = {path: order for path, order in found.items() if path not in saved}
    experts = [path for path, order in found.items() if "e" in order]
    if experts and adapter.dropout:
        raise ImportedModelError(
            f"program.adapter.dropout = {adapter.dropout} applies to the input of a linear layer, "
            f"and {experts[0]} is a parameter of stacked experts, to whose weights the product is "
            "added, as in PEFT; set dropout = 0"
        )
    return found


def _refuse_other_layers(
    opened: OpenedModel, patterns: Iterable[str], eligible: Mapping[str, str]
) -> None:
    """Refuse names that PEFT would also match with layers that have no factors here.

    Globs are no names of PEFT: they match only what can have factors.
    """
    names = opened.parameter_names_by_path()
    for path in names:
        module = path.removesuffix("/weight")
        layer = opened.meta.module.get_submodule(names[path][0].rpartition(".")[0])
        if module in eligible or module == path or not isinstance(layer, _OTHERS_OF_PEFT):
            continue
        for pattern in patterns:
            if matches(module, pattern) and not set(pattern) & set("*?["):
                raise ShardingError(
                    f"program.adapter.target_modules: {pattern!r} also names {module}, a "
                    f"{type(layer).__name__}, which can have factors in PEFT but not here; name "
                    "only linear layers, with more of their path (as in 'attn/proj')"
                )


def fully_trained_paths(opened: OpenedModel, adapter: Adapter) -> list[str]:
    """Return the paths of the parameters that are trained in full beside LoRA.

    A pattern names a parameter or its module.

    Raises:
        ShardingError: a pattern matches no parameter.
    """
    trained = [path for path, spec in opened.specs().items() if spec.role == "parameter"]
    names = {name: path for path in trained for name in (path, path.rpartition("/")[0]) if name}
    chosen = matching_paths(adapter.modules_to_save, names, "adapter.modules_to_save")
    modules = {name for name in chosen if name not in trained}
    return [path for path in trained if path in chosen or path.rpartition("/")[0] in modules]


def trained_arrays(opened: OpenedModel, adapter: Adapter | None) -> Arrays:
    """Return the arrays that have gradients and optimizer state, by path.

    Raises:
        ShardingError: a pattern of the adapter matches nothing.
    """
    specs = opened.specs()
    if adapter is None:
        return specs
    trained = {path: specs[path] for path in fully_trained_paths(opened, adapter)}
    for path, order in lora_orders(opened, adapter).items():
        first, second = _factors(specs[path], order, adapter.rank)
        trained |= {f"{path}/{LORA_A}": first, f"{path}/{LORA_B}": second}
    return trained


def frozen_arrays(opened: OpenedModel, program: ResolvedProgram) -> Arrays:
    """Return the frozen arrays by path: the base weights of LoRA, or DPO's reference model.

    Raises:
        ShardingError: a pattern of the adapter matches nothing.
    """
    adapter, frozen = program.adapter, {}
    is_dpo = program.loss.kind == "dpo"
    if adapter is None and not is_dpo:
        return {}
    # DPO's reference model also needs the initial values of parameters that are trained in full.
    trained = () if adapter is None or is_dpo else fully_trained_paths(opened, adapter)
    quantizable = adaptable_orders(opened) if adapter is not None else {}
    for path, spec in opened.specs().items():
        if path not in trained:
            stored = replace(spec, role="frozen")
            frozen |= _stored_form(path, stored, path in quantizable, program)
    return frozen


def _stored_form(
    path: str, spec: ArraySpec, is_quantizable: bool, program: ResolvedProgram
) -> Arrays:
    """Return the arrays that store a frozen parameter, by the base dtype of the adapter."""
    base = "float32" if program.adapter is None else program.adapter.base_dtype
    is_matrix = len([axis for axis in spec.axes if axis != "layers"]) > 1
    if base == "float32" or "router" in spec.axes or not (is_matrix or is_quantizable):
        return {path: spec}
    if base in ("int8", "nf4") and is_quantizable:
        return quantized_form(path, spec, base, program)
    is_table = "embed" in spec.axes
    return {path: replace(spec, dtype="bfloat16") if is_table else spec}


def _factors(spec: ArraySpec, order: str, rank: int) -> tuple[ArraySpec, ArraySpec]:
    """Return the specs of a parameter's two LoRA factors."""
    sizes = dict(zip(order, spec.shape[-len(order) :], strict=True))
    axes = dict(zip(order, spec.axes[-len(order) :], strict=True))
    shape, names = spec.shape[: -len(order)], spec.axes[: -len(order)]
    if "e" in order:
        shape, names = (*shape, sizes["e"]), (*names, axes["e"])
    return (
        ArraySpec((*shape, rank, sizes["i"]), (*names, "rank", axes["i"])),
        ArraySpec((*shape, sizes["o"], rank), (*names, axes["o"], "rank")),
    )


def apply_lora(
    opened: OpenedModel,
    program: Program,
    trained: Tree,
    frozen: Tree,
    key: jax.Array | None,
    layers: jax.Array | None,
) -> Tree:
    """Return the parameters of a model, built from trained and frozen ones.

    An adapted parameter becomes an AdaptedParameter; the arguments are those of
    models.lora.layers.apply_lora.
    """
    adapter = program.adapter
    if adapter is None:
        return trained
    base, factors = _reference_weights(opened, frozen), flatten(trained) if trained else {}
    weights: dict[str, Parameter] = {**base}
    for index, (path, order) in enumerate(lora_orders(opened, adapter).items()):
        if path not in base:
            continue  # of another pipeline stage
        keys = None
        if key is not None and adapter.dropout:
            keys = _dropout_keys(opened, path, jax.random.fold_in(key, index), layers)
        a, b = factors.pop(f"{path}/{LORA_A}"), factors.pop(f"{path}/{LORA_B}")
        scale, dropout = adapter.scale, adapter.dropout
        weights[path] = AdaptedParameter(base[path], a, b, keys, scale, dropout, order)
    return unflatten(weights | factors)


def _dropout_keys(
    opened: OpenedModel, path: str, key: jax.Array, layers: jax.Array | None
) -> jax.Array:
    """Return a dropout key, or those of the rows of a stacked parameter."""
    if not opened.is_stacked(path):
        return key
    keys = jax.random.split(key, len(opened.parameter_names_by_path()[path]))
    return keys if layers is None else keys[layers]


def reference_parameters(opened: OpenedModel, frozen: Tree) -> Tree:
    """Return the frozen parameters alone, as parameters of the model."""
    return unflatten(_reference_weights(opened, frozen))


def _reference_weights(opened: OpenedModel, frozen: Tree) -> dict[str, jax.Array | QuantizedWeight]:
    weights = flatten(frozen) if frozen else {}
    specs, dtype = opened.specs(), jnp.dtype(opened.settings.dtype)

    def axes(path: str) -> tuple[str | None, ...]:
        return specs[path].axes[1:] if opened.is_stacked(path) else specs[path].axes

    for path in [path for path in weights if path.endswith(f"/{CODES}")]:
        base = path.removesuffix(f"/{CODES}")
        codes, scales = weights.pop(path), weights.pop(f"{base}/{SCALES}")
        kind = "int8" if codes.dtype == jnp.int8 else "nf4"
        weights[base] = QuantizedWeight(codes, scales, kind, dtype, axes(base))
    for path, weight in weights.items():
        # The dtype of the computation decides, not that in which the weight is stored.
        if weight.dtype == jnp.bfloat16 != dtype:
            if opened.is_stacked(path):
                weights[path] = QuantizedWeight(weight, None, None, dtype, axes(path))
            else:
                weights[path] = weight.astype(dtype)
    return weights
