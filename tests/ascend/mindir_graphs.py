"""Functions of JAX as graphs for MindSpore."""

from collections.abc import Callable
from typing import Any

import jax

from lowering.ascend.schema import FLOAT, INT64, NONE, TENSORS
from lowering.ascend.translate import MindirGraph, translate
from lowering.per_device.normalize import normalize_module
from lowering.xla.spmd_module import partition_spmd


def translated(
    function: Callable, *arguments, native: bool = False, in_place: dict[int, int] | None = None
) -> MindirGraph:
    """The graph of a function of JAX, for one rank."""
    lowered = jax.jit(function, keep_unused=True).lower(*arguments)
    normalised = normalize_module(partition_spmd(lowered).hlo, name="test", ranks=1)
    return translate(normalised, name="test", ranks=1, native=native, in_place=in_place or {})


def operators(model) -> list[tuple[str, Any]]:
    """Name and node of every operator of a graph, and of those that it calls."""
    kinds = {one.name: one.op_type for one in model.primitives}
    return [
        (kinds[node.op_type.removeprefix("REF::")], node)
        for graph in (model.graph, *model.functions)
        for node in graph.node
        if node.op_type.removeprefix("REF::") in kinds
    ]


def settings(model, node) -> list:
    """What an operator is given: None, numbers, and "array" for all else."""
    constants = {
        one.name: one.attribute[0] for one in model.graph.node if one.op_type == "Constant"
    }

    def given(name):
        constant = constants.get(name)
        if constant is None or constant.type == TENSORS:
            return "array"
        return {NONE: None, INT64: constant.i, FLOAT: constant.f}[constant.type]

    return [given(name) for name in node.input]


def shapes(node) -> list[tuple[tuple[int, ...], int]]:
    """Shape and type of each result of a node."""
    (result,) = (one for one in node.attribute if one.name == "shape")
    parts = [tensor for value in result.values for tensor in value.tensors] or result.tensors
    return [(tuple(tensor.dims), tensor.data_type) for tensor in parts]
