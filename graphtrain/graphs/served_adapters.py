"""LoRA adapters beside the base weights of a served model; each sequence uses one of them, or none.

The ranks of all adapters lie side by side in the two factors of each adapted weight. A sequence has
the interval of the ranks that are its adapter's; those of the others do not count. So adapters of
any ranks share one program, the base is the empty interval, and no weights are gathered by row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.graphs.names import ADAPTER_RANKS
from graphtrain.models.lora.layers import LoraWeight
from graphtrain.models.lora.trainable import ADAPTERS, LORA_A, LORA_B, served_adapter_arrays
from lowering.trees import Tree, flatten, unflatten
from sharding_rules.arrays import ArraySpec


def adapter_input(program: ResolvedProgram) -> dict[str, Tree]:
    """Return the input of serve_init with the factors of all adapters; none without adapters."""
    arrays = served_adapter_arrays(program.settings)
    return {ADAPTERS: unflatten(arrays)} if arrays else {}


def ranks_input(program: ResolvedProgram) -> dict[str, ArraySpec]:
    """Return the ArraySpec of a sequence's interval of ranks; none without adapters."""
    if not program.settings.serve.total_adapter_rank:
        return {}
    return {ADAPTER_RANKS: ArraySpec((2,), (None,), "int32", "activation")}


def adapter_weight_specs(program: ResolvedProgram) -> dict[str, ArraySpec]:
    """Return the ArraySpecs of the served factors by path: rows of layers apart, in their dtype."""
    served: dict[str, ArraySpec] = {}
    for path, spec in served_adapter_arrays(program.settings).items():
        order = _served_order(path, spec, program)
        shape, axes = tuple(spec.shape[i] for i in order), tuple(spec.axes[i] for i in order)
        for layer in range(spec.shape[0]):
            served[_served_path(path, layer)] = ArraySpec(shape, axes, program.model.dtype)
    return served


def cast_adapters(adapters: Tree, program: ResolvedProgram) -> dict[str, jax.Array]:
    """Return the arrays of adapter_weight_specs for the factors of adapters."""
    specs, weights = served_adapter_arrays(program.settings), {}
    for path, array in flatten(adapters).items():
        order = _served_order(path, specs[path], program)
        for layer, row in enumerate(array):
            transposed = row.transpose([index - 1 for index in order])
            weights[_served_path(path, layer)] = transposed.astype(program.model.dtype)
    return weights


def with_adapters(
    parameters: Tree, adapters: Tree, program: ResolvedProgram, intervals: jax.Array
) -> Tree:
    """Return parameters in which each adapted weight is a LoraWeight.

    Args:
        parameters: Weights, those of the layers as tuples of arrays.
        adapters: Arrays of adapter_weight_specs, in the tree of served weights.
        program: The program that serves.
        intervals: Begin and end of the ranks of each sequence's adapter, int32 (batch, 2).
    """
    ranks = jnp.arange(program.settings.serve.total_adapter_rank)
    used = (intervals[:, :1] <= ranks) & (ranks < intervals[:, 1:])
    weights, factors = flatten(parameters), flatten(adapters, ADAPTERS)
    specs = served_adapter_arrays(program.settings)

    def factor(path: str, layer: int) -> jax.Array:
        order = _served_order(path, specs[path], program)
        back = [order.index(index + 1) for index in range(len(order))]
        return factors[_served_path(path, layer)].transpose(back)

    for path in [path.removesuffix(f"/{LORA_A}") for path in specs if path.endswith(LORA_A)]:
        weights[path] = tuple(
            LoraWeight(
                weight,
                factor(f"{path}/{LORA_A}", layer),
                factor(f"{path}/{LORA_B}", layer),
                key=None,
                scale=1.0,
                dropout=0.0,
                ranks=used,
            )
            for layer, weight in enumerate(weights[path])
        )
    return unflatten(weights)


def _served_path(path: str, layer: int) -> str:
    return f"{path.replace('layers', ADAPTERS, 1)}/{layer:03}"


def _served_order(path: str, spec: ArraySpec, program: ResolvedProgram) -> list[int]:
    """Return the axes of a factor of one layer in the order in which they are served.

    On a CPU the summed axes come last; see models.matmul.few_rows.
    """
    order = list(range(1, len(spec.axes)))
    if program.target.platform != "cpu":
        return order
    return [order[-1], *order[:-1]] if path.endswith(f"/{LORA_A}") else [*order[1:], order[0]]
