"""LoRA weights (`LoraWeight`) and quantized weights (`QuantizedWeight`), in place of plain arrays.

Both are leaves of the parameter tree that pass through the decoder's scan over layers as arrays do.
The decoder's modules do not depend on them: they call `multiply`, which accepts either.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from graphtrain.config.schema import Precision, Program
from graphtrain.models.lora.quantize import NF4, QuantizationKind
from graphtrain.models.lora.trainable import CODES, LORA_A, LORA_B, SCALES, lora_paths
from graphtrain.models.matmul import dot, dot_many
from graphtrain.models.quantized_matmul import quantized_dot
from graphtrain.models.shapes import STACKS, parameter_arrays
from lowering.tracing import source_lines
from lowering.tracing.constrain import constrain, draw_shard, shards_of
from lowering.trees import Tree, flatten, unflatten

source_lines.report_callers(__file__)

# Array axes of the letters of equations; l is a latent, of keys or of queries.
_AXES = {
    "b": "batch",
    "s": "seq",
    "e": "embed",
    "h": "heads",
    "d": "head_dim",
    "m": "mlp",
    "l": "kv_lora",
}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales"],
    meta_fields=["kind", "dtype", "axes"],
)
class QuantizedWeight:
    """Block-wise quantized weights, as codes and scales; see `models.lora.quantize`."""

    def __init__(
        self,
        codes: jax.Array,
        scales: jax.Array | None,  # None: codes are the weights, in bfloat16
        kind: QuantizationKind | None,
        dtype: DTypeLike,
        axes: tuple[str | None, ...],  # array axes of the weights in one layer
    ):
        self.codes, self.scales, self.kind, self.dtype = codes, scales, kind, dtype
        self.axes = axes

    @jax.named_scope("dequantise")
    def dequantize(self) -> jax.Array:
        """Return the dequantized weights, in the dtype of the computation."""
        codes = self._gathered(self.codes)
        if self.scales is None:
            return codes.astype(self.dtype)
        if self.kind == "int8":
            relative = codes.astype(jnp.float32) * jnp.float32(1 / 127)
        else:
            pairs = jnp.stack([codes & 15, codes >> 4], -1)
            relative = jnp.asarray(NF4)[pairs.reshape(*codes.shape[:-1], -1).astype(jnp.int32)]
        scales = self._gathered(self.scales)
        block = relative.shape[-1] // scales.shape[-1]
        return (relative * jnp.repeat(scales, block, -1)).astype(self.dtype)

    def _gathered(self, x: jax.Array) -> jax.Array:
        """Shard x as the computation uses the weights: devices then exchange codes, not weights."""
        axes = [
            axis if axis and size % shards_of(axis) == 0 else None
            for axis, size in zip(self.axes, x.shape, strict=True)
        ]
        return constrain(x, *axes)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "a", "b", "key", "ranks"],
    meta_fields=["scale", "dropout"],
)
class LoraWeight:
    """Frozen weight and its two LoRA factors."""

    def __init__(
        self,
        weight: jax.Array | QuantizedWeight,
        a: jax.Array,
        b: jax.Array,
        key: jax.Array | None,  # dropout key, one per layer; None: no dropout
        scale: float,
        dropout: float,
        ranks: jax.Array | None = None,  # that each sequence uses, bool (batch, rank); None: all
    ):
        self.weight, self.a, self.b, self.key = weight, a, b, key
        self.scale, self.dropout, self.ranks = scale, dropout, ranks


Weight = jax.Array | QuantizedWeight | LoraWeight


def apply_lora(
    program: Program,
    trained: Tree,
    frozen: Tree,
    key: jax.Array | None = None,
    layers: jax.Array | None = None,
) -> Tree:
    """Return the decoder's parameters, built from trained and frozen weights.

    With an adapter every adapted weight becomes an `LoraWeight`.

    Args:
        program: Settings.
        trained: Arrays of models.lora.trainable.trained_arrays, or those of one pipeline stage.
        frozen: Arrays of models.lora.trainable.frozen_arrays, or those of one pipeline stage; not
            read if there is no adapter.
        key: Random key for LoRA dropout; without it there is no dropout.
        layers: Layer of each row of the arrays, of which the dropout depends; None: all in order.
    """
    adapter = program.adapter
    if adapter is None:
        return trained
    base = _reference_weights(program, frozen)
    weights: dict[str, Weight] = {**base}
    trained_weights, arrays = flatten(trained) if trained else {}, parameter_arrays(program.model)
    for index, path in enumerate(lora_paths(program.model, adapter)):
        if path not in base:
            continue  # of another stage
        keys = None
        if key is not None and adapter.dropout:
            keys = jax.random.split(jax.random.fold_in(key, index), arrays[path].shape[0])
            keys = keys if layers is None else keys[layers]
        a, b = trained_weights.pop(f"{path}/{LORA_A}"), trained_weights.pop(f"{path}/{LORA_B}")
        weights[path] = LoraWeight(base[path], a, b, keys, adapter.scale, adapter.dropout)
    return unflatten(weights | trained_weights)


def reference_parameters(program: Program, frozen: Tree) -> Tree:
    """Return the frozen weights alone, as parameters of the decoder."""
    return unflatten(_reference_weights(program, frozen))


def _reference_weights(program: Program, frozen: Tree) -> dict[str, jax.Array | QuantizedWeight]:
    """Return the frozen weights by path; there are none in some parts of a pipeline."""
    dtype = jnp.dtype(program.model.dtype)
    weights = flatten(frozen) if frozen else {}
    arrays = parameter_arrays(program.model)
    for path in [path for path in weights if path.endswith(f"/{CODES}")]:
        base_path = path.removesuffix(f"/{CODES}")
        codes, scales = weights.pop(path), weights.pop(f"{base_path}/{SCALES}")
        kind: QuantizationKind = "int8" if codes.dtype == jnp.int8 else "nf4"
        weights[base_path] = QuantizedWeight(codes, scales, kind, dtype, arrays[base_path].axes[1:])
    for path, weight in weights.items():
        # `dot` computes in bfloat16 if either operand is, and model.dtype must decide instead.
        if weight.dtype == jnp.bfloat16 != dtype:
            axes = arrays[path].axes
            is_stacked = axes[0] in STACKS
            weights[path] = (
                QuantizedWeight(weight, None, None, dtype, axes[1:])
                if is_stacked
                else weight.astype(dtype)
            )
    return weights


def plain_array(weight: Weight) -> jax.Array:
    """Return a weight as a plain array; the weight must not have an adapter."""
    assert not isinstance(weight, LoraWeight)
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def multiply(
    equation: str, x: jax.Array, weight: Weight, precision: Precision | None = None
) -> jax.Array:
    """Multiply x by a weight: a plain array, a quantized weight, or one with LoRA factors.

    Args:
        equation: Einsum equation of x and the weight of one layer.
        x: Activations.
        weight: The weight.
        precision: How the product, without that of LoRA, is computed in fp8 or int8; None: it is
            not.
    """
    return multiply_many(equation, x, [weight], precision)[0]


def multiply_many(
    equation: str, x: jax.Array, weights: Sequence[Weight], precision: Precision | None = None
) -> list[jax.Array]:
    """Multiply one x by several weights; see multiply."""
    base = [weight.weight if isinstance(weight, LoraWeight) else weight for weight in weights]
    results = _frozen_products(equation, x, base, precision)
    return [
        result + _adapter(equation, x, weight) if isinstance(weight, LoraWeight) else result
        for result, weight in zip(results, weights, strict=True)
    ]


def _frozen_products(
    equation: str,
    x: jax.Array,
    weights: Sequence[jax.Array | QuantizedWeight],
    precision: Precision | None,
) -> list[jax.Array]:
    def multiply(x: jax.Array, weights: Sequence[jax.Array | QuantizedWeight]) -> list[jax.Array]:
        arrays = [plain_array(weight) for weight in weights]
        if precision is not None:
            return [quantized_dot(precision, equation, x, array, x.dtype) for array in arrays]
        return [dot(equation, x, arrays[0])] if len(arrays) == 1 else dot_many(equation, x, arrays)

    if any(isinstance(weight, QuantizedWeight) for weight in weights):
        # The backward pass dequantizes again, instead of saving the dequantized weights.
        multiply = jax.checkpoint(multiply, prevent_cse=False)
    return multiply(x, weights)


@jax.named_scope("adapter")
def _adapter(equation: str, x: jax.Array, adapted: LoraWeight) -> jax.Array:
    """Return the LoRA product: x times both factors, times the scale.

    Source: Hu et al. 2021, "LoRA", section 4.1, https://arxiv.org/abs/2106.09685
    """
    inputs, result_letters = equation.split("->")
    x_letters, weight_letters = inputs.split(",")
    contracted = "".join(letter for letter in weight_letters if letter not in result_letters)
    output_letters = "".join(letter for letter in weight_letters if letter in result_letters)
    rows = "".join(letter for letter in x_letters if letter in result_letters)
    x = _dropped(x, adapted, x_letters)
    low_rank = dot(f"{x_letters},{contracted}r->{rows}r", x, adapted.a)
    if adapted.ranks is not None:
        assert rows == "bs"
        low_rank = jnp.where(adapted.ranks[:, None], low_rank, 0)
    return dot(f"{rows}r,r{output_letters}->{result_letters}", low_rank, adapted.b) * adapted.scale


def _dropped(x: jax.Array, adapted: LoraWeight, letters: str) -> jax.Array:
    key, rate = adapted.key, adapted.dropout
    if key is None:
        return x
    axes = [_AXES[letter] for letter in letters]
    keep_mask = draw_shard(lambda shape: jax.random.bernoulli(key, 1 - rate, shape), x.shape, *axes)
    return jnp.where(keep_mask, x / (1 - rate), 0)
