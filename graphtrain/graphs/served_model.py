"""Model as it is served: its weights by layer and in their dtype, and its state of sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import jax

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import is_imported
from graphtrain.graphs.open_model import open_language_model
from graphtrain.graphs.sampling import request_specs
from graphtrain.graphs.served_adapters import (
    adapter_weight_specs,
    cast_adapters,
    ranks_input,
    with_adapters,
)
from graphtrain.models.attention.cache_layout import CacheSize, cache_layout
from graphtrain.models.attention.kv_cache import CacheRows, PackedTokens, layer_cache_specs
from graphtrain.models.int8_weight import Int8Weight, quantize_int8
from graphtrain.models.lora.trainable import ADAPTERS
from graphtrain.models.matmul import few_rows
from graphtrain.models.shapes import STACKS
from lowering.tracing.constrain import unsplit
from lowering.trees import Tree, flatten, unflatten
from sharding_rules.arrays import ArraySpec

if TYPE_CHECKING:
    from graphtrain.models.protocol import LogitsReader

CODES, SCALES = "codes", "scales"  # of an array that is served in int8


def weight_specs(program: ResolvedProgram) -> Tree:
    """Return the ArraySpecs of weights as they are served: rows of layers apart, in their dtype."""
    specs = flatten(open_language_model(program.model).specs())
    served: dict[str, ArraySpec] = {}
    for path, spec in specs.items():
        served |= _serving_specs(path, spec, program)
    return unflatten(served | adapter_weight_specs(program))


def _serving_specs(path: str, spec: ArraySpec, program: ResolvedProgram) -> dict[str, ArraySpec]:
    """Return the served arrays of one array of parameters.

    Vectors and routers stay float32, in which the model computes with them.
    """
    rows = spec.axes[0] in STACKS
    order = _served_order(spec, program)
    shape, axes = tuple(spec.shape[i] for i in order), tuple(spec.axes[i] for i in order)
    served = ArraySpec(shape, axes, _served_dtype(spec, axes, program), spec.role)
    names = [f"{path}/{row:03}" for row in range(spec.shape[0])] if rows else [path]
    if served.dtype != "int8":
        return dict.fromkeys(names, served)
    outputs = [index for index, axis in enumerate(axes) if axis not in _summed_axes(spec)]
    scales = ArraySpec(
        tuple(shape[i] for i in outputs), tuple(axes[i] for i in outputs), "float32", spec.role
    )
    return {
        f"{name}/{part}": described
        for name in names
        for part, described in ((CODES, served), (SCALES, scales))
    }


def _served_dtype(spec: ArraySpec, axes: tuple[str | None, ...], program: ResolvedProgram) -> str:
    """Return the dtype in which an array is served; vectors and routers compute in float32.

    Of int8 are the matrices that are only multiplied; what is looked up, too, stays bfloat16.
    """
    if len(axes) < 2 or "router" in axes:
        return "float32"
    dtype = program.settings.serve.weights_dtype
    assert dtype != "auto", "serving_program decides"
    is_multiplied = _is_multiplied_by_rows(spec, program)
    if (
        dtype == "int8"
        and is_multiplied
        and _summed_axes(spec)
        and not _is_unit_head(spec, program)
    ):
        return dtype
    if program.target.platform == "cpu" and not is_multiplied:
        return program.model.dtype
    return "bfloat16" if dtype == "int8" else dtype


def _is_multiplied_by_rows(spec: ArraySpec, program: ResolvedProgram) -> bool:
    """Return whether products with an array are models.matmul.dot: none of modules or experts."""
    is_module = open_language_model(program.model).uses_module_names
    axes = [axis for axis in spec.axes if axis not in STACKS]
    return not is_module and "experts" not in axes and len(axes) > 1


def _served_order(spec: ArraySpec, program: ResolvedProgram) -> list[int]:
    """Return the axes of an array of parameters in the order of its served arrays.

    On a CPU, the summed axes of the native decoder's weights come last; see
    models.matmul.few_rows; embeddings and experts stay as they are.
    """
    order = [index for index, axis in enumerate(spec.axes) if index or axis not in STACKS]
    if program.target.platform != "cpu" or not _is_multiplied_by_rows(spec, program):
        return order
    summed = _summed_axes(spec)
    return sorted(order, key=lambda index: spec.axes[index] in summed)


def _summed_axes(spec: ArraySpec) -> tuple[str | None, ...]:
    """Return the axes over which products with an array of the native decoder sum.

    Its weights begin with "embed" where that is summed, and end with it where all others are;
    tables, which are looked up, sum none.
    """
    axes = tuple(axis for axis in spec.axes if axis not in STACKS)
    if axes[0] == "embed":
        return ("embed",)
    return axes[:-1] if axes[-1] == "embed" and axes[0] not in ("vocab", "positions") else ()


def _is_unit_head(spec: ArraySpec, program: ResolvedProgram) -> bool:
    """Return whether an array is an LM head whose columns are scaled to unit length."""
    model = program.model
    return not is_imported(model) and model.unit_norm_head and "vocab" in spec.axes


def with_rows(weights: Tree, program: ResolvedProgram) -> Tree:
    """Return the tree of parameters, with a tuple of arrays for each array of stacked layers."""
    specs, served = flatten(open_language_model(program.model).specs()), flatten(weights)
    parameters: dict[str, Any] = {}
    for path, spec in specs.items():
        is_stacked, back = order_of_parameters(spec, program)
        names = [f"{path}/{row:03}" for row in range(spec.shape[0])] if is_stacked else [path]
        rows = tuple(weight_in_order(served, name, back) for name in names)
        parameters[path] = rows if is_stacked else rows[0]
    return unflatten(parameters)


def order_of_parameters(spec: ArraySpec, program: ResolvedProgram) -> tuple[bool, list[int]]:
    """Return whether layers are stacked in an array, and how to transpose what is served of it."""
    order = _served_order(spec, program)
    first = len(spec.shape) - len(order)
    return first > 0, [order.index(index + first) for index in range(len(order))]


def weight_in_order(
    served: Mapping[str, jax.Array], name: str, back: Sequence[int]
) -> jax.Array | Int8Weight:
    """Return a served array with its axes in the order of the parameters' array."""
    if name in served:
        return served[name].transpose(back)
    return Int8Weight(served[f"{name}/{CODES}"].transpose(back), served[f"{name}/{SCALES}"])


def cast_weights(parameters: Tree, program: ResolvedProgram, adapters: Tree | None = None) -> Tree:
    """Return the arrays of weight_specs for the parameters of a run, and factors of adapters."""
    weights: dict[str, jax.Array] = {} if adapters is None else cast_adapters(adapters, program)
    specs = flatten(open_language_model(program.model).specs())
    for (path, array), spec in zip(flatten(parameters).items(), specs.values(), strict=True):
        served, order = _serving_specs(path, spec, program), _served_order(spec, program)
        first = len(spec.shape) - len(order)  # 1 for an array of stacked layers
        rows = array if first else [array]
        transposed = [row.transpose([index - first for index in order]) for row in rows]
        is_int8 = any(like.dtype == "int8" for like in served.values())
        arrays = _quantized(transposed, order, spec) if is_int8 else transposed
        for (name, like), row in zip(served.items(), arrays, strict=True):
            weights[name] = row.astype(like.dtype)
    return unflatten(weights)


def _quantized(rows: Sequence[jax.Array], order: Sequence[int], spec: ArraySpec) -> list[jax.Array]:
    """Return codes and scales of each row, in the order of _serving_specs."""
    summed = tuple(at for at, axis in enumerate(order) if spec.axes[axis] in _summed_axes(spec))
    return [part for row in rows for part in quantize_int8(row, summed)]


def decode_step(
    program: ResolvedProgram,
    weights: Tree,
    kv_cache: Tree,
    tokens: jax.Array,
    rows: CacheRows,
    last: jax.Array | None = None,
    adapter_ranks: jax.Array | None = None,
    read: LogitsReader | None = None,
) -> tuple[Any, Tree]:
    """Run the model on new tokens; return logits, or what `read` returns, and the KV cache.

    `adapter_ranks` are the intervals of ranks of the rows' adapters, if the program has adapters.
    """
    model, parameters = open_language_model(program.model), with_rows(weights, program)
    if adapter_ranks is not None:
        parameters = with_adapters(parameters, weights[ADAPTERS], program, adapter_ranks)
    order = few_rows() if program.target.platform == "cpu" else nullcontext()
    one_row = unsplit("batch", "dispatch_batch") if rows.slot is not None else nullcontext()
    with order, one_row:
        return model.decode_step(parameters, kv_cache, tokens, rows, last, read)


def state_specs(program: ResolvedProgram) -> Tree:
    """Return the ArraySpecs of the state: KV cache, and how each sequence continues."""
    slots, vocab = program.settings.serve.slots, program.model.vocab
    requests = sequence_request_specs(program)
    by_slot = {
        "token": ((), "int32"),  # the last one, which is not in the KV cache yet
        "position": ((), "int32"),  # of this token
        "active": ((), "int32"),
        # Occurrences of each token; Neuron's compiler refuses a scatter that adds integers.
        "generated": ((vocab,), "float32"),
        **{name: (spec.shape, spec.dtype) for name, spec in requests.items()},
    }
    sequences = {
        name: ArraySpec((slots, *shape), ("batch", *[None] * len(shape)), dtype, "activation")
        for name, (shape, dtype) in by_slot.items()
    }
    return {"kv_cache": kv_cache_specs(program, slots), "sequences": sequences}


def sequence_request_specs(program: ResolvedProgram) -> dict[str, ArraySpec]:
    """Return the ArraySpecs of a request: how its tokens are chosen, and by which adapter."""
    return request_specs(program.model.vocab) | ranks_input(program)


def kv_cache_specs(program: ResolvedProgram, slots: int) -> Tree:
    """Return the specs of a KV cache; each layer has arrays of its own, updated in place."""
    layers = open_language_model(program.model).cached_layers()
    size, dtype = cache_size(program), program.model.dtype
    return unflatten(
        {
            f"{path}/{name}": spec
            for path, layer in layers.items()
            for name, spec in layer_cache_specs(layer, slots, size, dtype).items()
        }
    )


def cache_size(program: ResolvedProgram) -> CacheSize:
    """Return the sizes of the KV cache; a padded prefill may reach beyond the context."""
    prefill = program.settings.serve.prefill
    layout = cache_layout(program.target)
    return CacheSize(program.batch.seq_len, prefill[0], prefill[-1], layout)


def continued_rows(
    program: ResolvedProgram,
    offset: jax.Array,
    slot: jax.Array | None = None,
    packed: PackedTokens | None = None,
) -> CacheRows:
    """Return the rows of a batch that continues sequences, in the layout of the target."""
    return CacheRows(offset, program.batch.seq_len, slot, cache_layout(program.target), packed)


def read_axis(program: ResolvedProgram) -> str | None:
    """Return the array axis of slots in outputs that every process reads.

    With several processes it is that of no mesh axis: each process reads only what its own devices
    hold, and all of them decide by the same outputs what is computed next.
    """
    return "batch" if program.target.processes == 1 else None


def scalar(dtype: str) -> ArraySpec:
    """Return the ArraySpec of a number."""
    return ArraySpec((), (), dtype, "activation")
