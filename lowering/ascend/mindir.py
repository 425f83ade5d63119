"""Writer of MindIR, the binary form of a graph that MindSpore loads.

Source: the files that mindspore.export of mindspore 2.10.0 writes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from lowering.ascend.schema import (
    BOOL,
    CHOICE,
    CLOSURE,
    FLOAT,
    FUNCTION,
    GRAPH,
    INT64,
    LIST,
    MESSAGES,
    NONE,
    PRIMITIVE,
    STRING,
    TENSOR_TYPES,
    TENSORS,
    TUPLE,
    UMONAD,
)
from lowering.hlo.protobuf import classes

Shape = tuple[int, ...]

_VERSION = 3  # MindIR version with which MindSpore reads operands as they are written

# Operators whose settings are attributes; all others have them as inputs.
_WITH_ATTRIBUTES = {
    "AllGather", "AllReduce", "AlltoAll", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Depend",
    "Invert", "Load", "MakeTuple", "NeighborExchange", "Partial", "ReduceScatter", "Rint", "Sort",
    "Switch",
    "TensorScatterMax", "TensorScatterMin", "TensorScatterMul", "TensorScatterUpdate", "TopK",
    "TruncateDiv", "TruncateMod", "TupleGetItem", "UpdateState",
}  # fmt: skip

# Operators whose result may share memory with their inputs.
_MEMORY_SHARING = {
    "BroadcastTo", "Depend", "MakeTuple", "Partial", "Reshape", "StridedSlice", "Transpose",
    "TupleGetItem",
}  # fmt: skip


def read(binary: bytes) -> Any:
    """Parse a ModelProto."""
    model = _classes()["ModelProto"]()
    model.ParseFromString(binary)
    return model


@functools.cache
def _classes() -> dict[str, Any]:
    return classes("graphtrain.mindir", MESSAGES, "proto2")


class TensorInfo:
    """Shape and type of a tensor, which describe a node's result."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        self.shape: Shape = tuple(int(size) for size in shape)
        self.dtype = dtype  # HLO's name of the type


class MindirWriter:
    """Writer of one graph, node by node; nodes are referred to by their names."""

    def __init__(self, name: str) -> None:
        self.model = _classes()["ModelProto"](
            ir_version="1.1",
            producer_name="graphtrain",
            model_version="2.10.0",
            little_endian=True,
            mind_ir_version=_VERSION,
        )
        self._graph = self.model.graph
        self._graph.name = name
        self.count = 0  # number of nodes
        self._users: dict[str, list[str]] = {}  # by the node that reads the variable
        self._same_memory: dict[str, frozenset[str]] = {}  # node to nodes that read variables
        self._constants: dict[Any, str] = {}  # of the current graph
        self._primitives: dict[Any, str] = {}

    def input(self, name: str, tensor: TensorInfo) -> str:
        """Add an argument to the current graph; arguments are in the order of these calls."""
        added = self._graph.input.add(name=f"{self._graph.name}:{name}")
        _describe(added.tensor.add(), tensor)
        return added.name

    def parameter(self, name: str, tensor: TensorInfo) -> str:
        """Add a variable to the graph; the loader sets its first value, Assign updates it."""
        added = self._graph.parameter.add(
            name=f"{self._graph.name}:{name}", ref_key=name, compression_type=0
        )
        _describe(added, tensor)
        return added.name

    def reading(self, variable: str, tensor: TensorInfo) -> str:
        """Add a node that reads a variable before anything is written."""
        name = self.node("Load", [variable, self.monad()], tensor)
        self._users[name] = []
        self._same_memory[name] = frozenset([name])
        return name

    @contextmanager
    def function(self, name: str) -> Iterator[None]:
        """Write the nodes added in this context into a new graph, which others call by name."""
        outer = self._graph, self._constants
        self._graph, self._constants = self.model.functions.add(name=name), {}
        try:
            yield
        finally:
            self._graph, self._constants = outer

    def call(self, function: str, inputs: Sequence[str], tensors: Sequence[TensorInfo]) -> str:
        """Call a function; return the node of its tuple of results."""
        return self._operator(f"REF::{function}", inputs, tensors)

    def choice(
        self,
        condition: str,
        options: Sequence[tuple[str, Sequence[str]]],
        tensors: Sequence[TensorInfo],
    ) -> str:
        """Call one of two functions; return the node of its tuple of results.

        Args:
            condition: node of a boolean.
            options: name and inputs of the function for a true condition, then of the other one.
            tensors: the results.
        """
        closures = []
        for function, inputs in options:
            # A function is referred to by its name, and a closure by the node that creates it.
            closure = self.node("Partial", [function, *inputs], None, {"side_effect_propagate": 1})
            closure_attribute = self._graph.node[-1].attribute[-1]
            closure_attribute.type, closure_attribute.s = CLOSURE, closure.encode()
            closures.append(closure)
        chosen = self.node("Switch", [condition, *closures], None)
        result = self._graph.node[-1].attribute[-1]
        result.type = CHOICE
        for function, _ in options:
            result.values.add(type=GRAPH, s=function.encode())
        readings = frozenset().union(*(self._same_memory.get(one, ()) for one in closures))
        name = self.call(chosen, [], tensors)
        self._reads(name, readings, is_view=True)
        return name

    def constant(self, value: Any) -> str:
        """Add a constant: a number, boolean, tuple of integers, array of a MindIR type, or None."""
        key = (
            (value.dtype.str, value.dtype.name, value.shape, value.tobytes())
            if isinstance(value, np.ndarray)
            else (type(value), value)
        )
        if key not in self._constants:
            node = self._graph.node.add(op_type="Constant")
            _set_value(node.attribute.add(name="value"), value)
            self._constants[key] = self._finish(node, "c")
        return self._constants[key]

    def monad(self) -> str:
        """Return the node for the state before all reads and writes of variables, to order them."""
        if "monad" not in self._constants:
            node = self._graph.node.add(op_type="Constant")
            node.attribute.add(name="value", type=UMONAD)
            self._constants["monad"] = self._finish(node, "c")
        return self._constants["monad"]

    def node(
        self,
        operator: str,
        inputs: Sequence[str],
        result: TensorInfo | Sequence[TensorInfo] | None,
        attributes: Mapping[str, Any] | None = None,
        ref: str | None = None,
    ) -> str:
        """Append an operator.

        Args:
            operator: MindSpore's name of it.
            inputs: names of nodes.
            result: tensor of the result, or tensors of a tuple; None for a monad.
            attributes: of the primitive.
            ref: name of the variable that the result refers to.
        """
        kind = f"REF::{self._primitive(operator, attributes or {})}"
        name = self._operator(kind, inputs, result, operator in _MEMORY_SHARING)
        node = self._graph.node[-1]
        node.domain = f"Default/{operator}-op{self.count - 1}"
        if ref is not None:
            node.attribute[-1].tensors[0].ref_key = ref
        return name

    def _operator(
        self,
        kind: str,
        inputs: Sequence[str],
        result: TensorInfo | Sequence[TensorInfo] | None,
        is_view: bool = True,
    ) -> str:
        node = self._graph.node.add(input=inputs, op_type=kind)
        _set_result(node.attribute.add(name="shape"), result)
        name = self._finish(node, "n")
        readings = frozenset().union(*(self._same_memory.get(one, ()) for one in inputs))
        self._reads(name, readings, is_view)
        return name

    def _reads(self, name: str, readings: frozenset[str], is_view: bool) -> None:
        for reading in sorted(readings):
            self._users[reading].append(name)
        if is_view and readings:
            self._same_memory[name] = readings

    def readers_of(self, reading: str) -> list[str]:
        """Return the nodes that read a variable, which must run before it is overwritten."""
        return self._users[reading]

    def finish(
        self, outputs: Sequence[str], tensors: Sequence[TensorInfo], after: str | None
    ) -> bytes:
        """Return the file of a graph that returns a tuple, after the side effects of `after`."""
        self.return_new_tuple(outputs, tensors, after)
        return self.model.SerializeToString(deterministic=True)

    def return_new_tuple(
        self, outputs: Sequence[str], tensors: Sequence[TensorInfo], after: str | None = None
    ) -> None:
        """End the current graph: return a new tuple."""
        result = self.node("MakeTuple", outputs, tensors)
        if after is not None:
            result = self.node(
                "Depend", [result, after], tensors, attributes={"side_effect_propagate": 1}
            )
        self.return_tuple(result, tensors)

    def return_tuple(self, name: str, tensors: Sequence[TensorInfo]) -> None:
        """End the current graph: return an existing tuple."""
        output = self._graph.output.add(name=name, denotation="Tuple")
        _set_result(output.attr_info, tensors)

    def _primitive(self, operator: str, attributes: Mapping[str, Any]) -> str:
        key = operator, repr(sorted(attributes.items()))
        if key not in self._primitives:
            name = f"{operator}:{len(self._primitives)}"
            kind = PRIMITIVE if operator in _WITH_ATTRIBUTES else FUNCTION
            added = self.model.primitives.add(
                name=name, op_type=operator, instance_name="", prim_type=kind
            )
            for attribute, value in sorted(attributes.items()):
                _set_value(added.attribute.add(name=attribute), value)
            self._primitives[key] = name
        return self._primitives[key]

    def _finish(self, node: Any, prefix: str) -> str:
        self.count += 1
        node.name = f"{self._graph.name}:{prefix}{self.count}"
        node.output.append(node.name)
        return node.name


def set_attribute(primitive: Any, name: str, value: Any) -> None:
    """Add an attribute to a primitive of an existing graph."""
    _set_value(primitive.attribute.add(name=name), value)


def _describe(into: Any, tensor: TensorInfo) -> None:
    into.dims.extend(tensor.shape)
    into.data_type = TENSOR_TYPES[tensor.dtype]


def _set_result(attribute: Any, result: TensorInfo | Sequence[TensorInfo] | None) -> None:
    if result is None:
        attribute.type = UMONAD
    elif isinstance(result, TensorInfo):
        attribute.type = TENSORS
        _describe(attribute.tensors.add(), result)
    else:
        attribute.type = TUPLE
        for tensor in result:
            _describe(attribute.values.add(type=TENSORS).tensors.add(), tensor)
        attribute.seq_info.is_dyn_len = False


def _set_value(attribute: Any, value: Any) -> None:
    if value is None:
        attribute.type = NONE
    elif isinstance(value, bool):
        attribute.type, attribute.i = BOOL, int(value)
    elif isinstance(value, int):
        attribute.type, attribute.i = INT64, value
    elif isinstance(value, float):
        attribute.type, attribute.f = FLOAT, value
    elif isinstance(value, str):
        attribute.type, attribute.s = STRING, value.encode()
    elif isinstance(value, np.ndarray):
        attribute.type = TENSORS
        tensor = attribute.tensors.add(name="value", raw_data=value.tobytes())
        _describe(tensor, TensorInfo(value.shape, hlo_type(value.dtype)))
    else:
        attribute.type = LIST if isinstance(value, list) else TUPLE
        for element in value:
            _set_element(attribute.values.add(), element)


def _set_element(attribute: Any, value: Any) -> None:
    """Set an element of a sequence; integers and strings are stored in list fields."""
    if isinstance(value, int):
        attribute.type = INT64
        attribute.ints.append(value)
    elif isinstance(value, str):
        attribute.type = STRING
        attribute.strings.append(value.encode())
    else:
        _set_value(attribute, value)


def hlo_type(dtype: np.dtype) -> str:
    """Return HLO's name of a NumPy dtype."""
    name = dtype.name
    if name == "bool":
        return "pred"
    if name == "bfloat16":
        return "bf16"
    kind = {"f": "f", "i": "s", "u": "u"}[dtype.kind]
    return f"{kind}{8 * dtype.itemsize}"
