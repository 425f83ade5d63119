"""Emitter: writes arrays and operators into a MindIR graph, and evaluates those that are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from lowering.ascend.mindir import MindirWriter, TensorInfo
from lowering.ascend.schema import TYPE_IDS
from lowering.ascend.values import ArrayValue, Shape, SliceUpdates, constant_value
from lowering.errors import LoweringError

NUMPY: dict[str, Any] = {
    "pred": np.bool_, "s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64, "f16": np.float16,
    "f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16,
}  # fmt: skip
_MAX_FOLDED_ELEMENTS = (
    1 << 16
)  # elements; operations on known arrays up to this size are evaluated at once
_MIN_BROADCAST_ELEMENTS = (
    64  # elements; a larger array of repeated elements is stored without repetition
)


class Emitter:
    """Writer of MindSpore operators over Values; methods behave as their namesakes in NumPy."""

    def __init__(self, name: str, *, native: bool) -> None:
        """Start a graph, for an Ascend device if `native`, else for a CPU.

        MindSpore's CPU operators support almost no bfloat16.
        """
        self.writer = MindirWriter(name)
        self.native = native

    def storage_type(self, dtype: str) -> str:
        """Return the type in which values of an HLO type are stored.

        Unsigned 32-bit integers are stored in 64 bits, with the upper half 0; unsigned 64-bit
        integers with the same bits in a signed type. On a CPU, bfloat16 is stored in float32.
        """
        if dtype in ("u32", "u64"):
            return "s64"
        return "f32" if dtype == "bf16" and not self.native else dtype

    def literal(self, data: np.ndarray, dtype: str) -> ArrayValue:
        """Return a Value with known elements, for an HLO type."""
        stored = self.storage_type(dtype)
        return constant_value(data.astype(NUMPY[stored]), stored)

    def integer(self, value: int, like: ArrayValue) -> ArrayValue:
        """Return a known scalar of the type of `like`."""
        return constant_value(np.array(value, NUMPY[like.dtype]), like.dtype)

    def node(self, value: ArrayValue) -> str:
        """Return the node of a value; write it if it is not in the graph yet."""
        if value.node is not None:
            return value.node
        if value.stacked is not None:
            written = self._assemble(value.stacked)
        else:
            assert value.data is not None
            written = self._constant(value.data, value.dtype)
        object.__setattr__(value, "node", written.node)  # the same array, now also in the graph
        assert value.node is not None
        return value.node

    def _constant(self, data: np.ndarray, dtype: str) -> ArrayValue:
        unrepeated = _unrepeated(data)
        if data.size > _MIN_BROADCAST_ELEMENTS and unrepeated.size < data.size:
            return self.broadcast_to(self._constant(unrepeated.copy(), dtype), data.shape)
        name = self.writer.constant(np.ascontiguousarray(data).reshape(data.shape))
        return ArrayValue(tuple(data.shape), dtype, node=name)

    def apply(
        self,
        operator: str,
        inputs: Sequence[Any],
        shape: Sequence[int],
        dtype: str,
        attributes: Mapping[str, Any] | None = None,
    ) -> ArrayValue:
        """Apply a MindSpore operator; inputs that are not Values are settings, as constants."""
        tensor = TensorInfo(shape, dtype)
        node = self.writer.node(operator, self._names(inputs), tensor, attributes)
        return ArrayValue(tensor.shape, dtype, node=node)

    def apply_multi(
        self, operator: str, inputs: Sequence[Any], tensors: Sequence[TensorInfo]
    ) -> tuple[ArrayValue, ...]:
        """Apply an operator that returns several results; see `apply`."""
        names = self._names(inputs)
        tuple_node = self.writer.node(operator, names, tensors)
        return tuple(
            self.tuple_element(tuple_node, index, tensor) for index, tensor in enumerate(tensors)
        )

    def tuple_element(self, together: str, number: int, tensor: TensorInfo) -> ArrayValue:
        """Return one element of a tuple of results."""
        node = self.writer.node("TupleGetItem", [together, self.writer.constant(number)], tensor)
        return ArrayValue(tensor.shape, tensor.dtype, node=node)

    def _names(self, inputs: Sequence[Any]) -> list[str]:
        return [
            self.node(x) if isinstance(x, ArrayValue) else self.writer.constant(x) for x in inputs
        ]

    def try_constant_fold(
        self, function: Callable[..., np.ndarray], inputs: Sequence[ArrayValue], dtype: str
    ) -> ArrayValue | None:
        """Return the result of a NumPy function if all inputs are known and small, else None."""
        data = [x.data for x in inputs if x.data is not None]
        if len(data) < len(inputs):
            return None
        shape = np.broadcast_shapes(*(x.shape for x in data))
        if len(data) == 1:
            data = [_unrepeated(data[0])]
        if math.prod(shape) > _MAX_FOLDED_ELEMENTS and (
            len(data) > 1 or data[0].size > _MAX_FOLDED_ELEMENTS
        ):
            return None
        with np.errstate(all="ignore"):
            result = np.asarray(function(*data)).astype(NUMPY[dtype])
        return constant_value(np.broadcast_to(result, shape), dtype)

    def elementwise(
        self,
        operator: str,
        function: Callable[..., np.ndarray] | None,
        inputs: Sequence[ArrayValue],
        dtype: str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> ArrayValue:
        """Apply an operator to each element; shapes broadcast as in NumPy."""
        dtype = dtype or inputs[0].dtype
        folded = self.try_constant_fold(function, inputs, dtype) if function is not None else None
        if folded is not None:
            return folded
        shape = np.broadcast_shapes(*(x.shape for x in inputs))
        return self.apply(operator, inputs, shape, dtype, attributes)

    # Arithmetic.

    def add(self, a: ArrayValue, b: ArrayValue) -> ArrayValue:
        return self.elementwise("Add", np.add, [a, b])

    def subtract(self, a: ArrayValue, b: ArrayValue) -> ArrayValue:
        return self.elementwise("Sub", np.subtract, [a, b])

    def multiply(self, a: ArrayValue, b: ArrayValue) -> ArrayValue:
        return self.elementwise("Mul", np.multiply, [a, b])

    def minimum(self, a: ArrayValue, b: ArrayValue) -> ArrayValue:
        return self.elementwise("Minimum", np.minimum, [a, b])

    def maximum(self, a: ArrayValue, b: ArrayValue) -> ArrayValue:
        return self.elementwise("Maximum", np.maximum, [a, b])

    def compare(self, operator: str, a: ArrayValue, b: ArrayValue) -> ArrayValue:
        """Compare by Equal, NotEqual, Less, LessEqual, Greater or GreaterEqual."""
        functions: dict[str, Any] = {
            "Equal": np.equal, "NotEqual": np.not_equal, "Less": np.less,
            "LessEqual": np.less_equal, "Greater": np.greater, "GreaterEqual": np.greater_equal,
        }  # fmt: skip
        if a.dtype == "pred":  # MindSpore compares numbers only
            a, b = self.cast(a, "s32"), self.cast(b, "s32")
        return self.elementwise(operator, functions[operator], [a, b], "pred")

    def logical_and(self, a: ArrayValue, b: ArrayValue) -> ArrayValue:
        return self.elementwise("LogicalAnd", np.logical_and, [a, b])

    def logical_or(self, a: ArrayValue, b: ArrayValue) -> ArrayValue:
        return self.elementwise("LogicalOr", np.logical_or, [a, b], "pred")

    def select(self, condition: ArrayValue, a: ArrayValue, b: ArrayValue) -> ArrayValue:
        """Return `a` where the condition is true, else `b`."""
        if condition.data is not None and condition.size:
            first = condition.data.flat[0]
            if condition.size == 1 or (condition.data == first).all():
                chosen = a if first else b
                shape = np.broadcast_shapes(condition.shape, a.shape, b.shape)
                return self.broadcast_to(chosen, shape)
        folded = self.try_constant_fold(np.where, [condition, a, b], a.dtype)
        if folded is not None:
            return folded
        shape = np.broadcast_shapes(condition.shape, a.shape, b.shape)
        condition, a, b = (self.broadcast_to(x, shape) for x in (condition, a, b))
        return self.apply("Select", [condition, a, b], shape, a.dtype)

    def cast(self, value: ArrayValue, dtype: str) -> ArrayValue:
        """Convert to another stored type, as in C."""
        if value.dtype == dtype:
            return value
        folded = self.try_constant_fold(lambda data: data, [value], dtype)
        return folded or self.apply("Cast", [value, TYPE_IDS[dtype]], value.shape, dtype)

    # Positions of elements.

    def reshape(self, value: ArrayValue, shape: Sequence[int]) -> ArrayValue:
        shape = tuple(shape)
        if shape == value.shape:
            return value
        if value.data is not None and value.size <= _MAX_FOLDED_ELEMENTS:
            return constant_value(value.data.reshape(shape), value.dtype)
        return self.apply("Reshape", [value, shape], shape, value.dtype)

    def transpose(self, value: ArrayValue, order: Sequence[int]) -> ArrayValue:
        order = tuple(int(axis) for axis in order)
        if order == tuple(range(len(order))):
            return value
        shape = tuple(value.shape[axis] for axis in order)
        if value.data is not None:
            return constant_value(value.data.transpose(order), value.dtype)
        if [size for size in shape if size > 1] == [size for size in value.shape if size > 1] and [
            axis for axis in order if value.shape[axis] > 1
        ] == sorted(axis for axis in order if value.shape[axis] > 1):
            return self.reshape(value, shape)
        return self.apply("Transpose", [value, order], shape, value.dtype)

    def reverse(self, value: ArrayValue, axes: tuple[int, ...]) -> ArrayValue:
        if value.data is not None:
            return constant_value(np.flip(value.data, axes), value.dtype)
        return self.apply("ReverseV2", [value, axes], value.shape, value.dtype)

    def broadcast_to(self, value: ArrayValue, shape: Sequence[int]) -> ArrayValue:
        """Repeat along axes of size 1, and along new leading axes."""
        shape = tuple(shape)
        if shape == value.shape:
            return value
        if value.data is not None:
            return constant_value(np.broadcast_to(value.data, shape), value.dtype)
        if len(shape) > len(value.shape):
            value = self.reshape(value, (1,) * (len(shape) - len(value.shape)) + value.shape)
        if shape == value.shape:
            return value
        return self.apply("BroadcastTo", [value, shape], shape, value.dtype)

    def slice(
        self,
        value: ArrayValue,
        starts: Sequence[int],
        limits: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> ArrayValue:
        steps = tuple(strides or (1,) * len(value.shape))
        starts, limits = tuple(starts), tuple(limits)
        if value.data is not None:
            return constant_value(value.data[tuple(map(slice, starts, limits, steps))], value.dtype)
        if value.stacked is not None and set(steps) <= {1}:
            block = self._written_slice(value.stacked, starts, limits)
            if block is not None:
                return block
        shape = tuple(
            max(0, -(-(limit - start) // step))
            for start, limit, step in zip(starts, limits, steps, strict=True)
        )
        if shape == value.shape:
            return value
        masks = (0,) * 5
        return self.apply(
            "StridedSlice", [value, starts, limits, steps, *masks], shape, value.dtype
        )

    def concatenate(self, values: Sequence[ArrayValue], axis: int) -> ArrayValue:
        parts = [x for x in values if x.shape[axis]]
        if len(parts) == 1:
            return parts[0]
        shape = list(values[0].shape)
        shape[axis] = sum(x.shape[axis] for x in values)
        dtype = values[0].dtype
        if math.prod(shape) <= _MAX_FOLDED_ELEMENTS and all(x.data is not None for x in parts):
            return constant_value(np.concatenate([x.data for x in parts], axis), dtype)  # type: ignore[misc]
        tensors = [TensorInfo(x.shape, dtype) for x in parts]
        tuple_node = self.writer.node("MakeTuple", [self.node(x) for x in parts], tensors)
        name = self.writer.node(
            "Concat", [tuple_node, self.writer.constant(axis)], TensorInfo(shape, dtype)
        )
        return ArrayValue(tuple(shape), dtype, node=name)

    def gather_axis(self, value: ArrayValue, indices: ArrayValue, axis: int) -> ArrayValue:
        """Select elements along one axis; every index must be within bounds."""
        shape = value.shape[:axis] + indices.shape + value.shape[axis + 1 :]
        if (
            value.data is not None
            and indices.data is not None
            and math.prod(shape) <= _MAX_FOLDED_ELEMENTS
        ):
            return constant_value(np.take(value.data, indices.data, axis), value.dtype)
        if value.dtype == "pred":  # MindSpore's Gather does not support booleans on a CPU
            return self.cast(self.gather_axis(self.cast(value, "s32"), indices, axis), "pred")
        return self.apply("Gather", [value, indices, axis, 0], shape, value.dtype)

    def overwrite_block(
        self, value: ArrayValue, update: ArrayValue, starts: Sequence[int]
    ) -> ArrayValue:
        """Return `value` with a block overwritten, which must lie within bounds."""
        starts = tuple(starts)
        partial = [a for a, size in enumerate(value.shape) if update.shape[a] != size]
        if not partial:
            return update
        if len(partial) == 1:
            axis = partial[0]
            updates = value.stacked if value.stacked and value.stacked.axis == axis else None
            stacked = (updates or SliceUpdates(value, axis)).with_part(starts[axis], update)
            stacked = stacked or SliceUpdates(value, axis).with_part(starts[axis], update)
            return ArrayValue(value.shape, value.dtype, stacked=stacked)
        # From the innermost axis on: each iteration extends the slab along one more axis.
        slab = update
        for axis in reversed(partial):
            low, high = list(starts), [s + n for s, n in zip(starts, slab.shape, strict=True)]
            low[axis], high[axis] = 0, value.shape[axis]
            around = self.slice(value, low, high)
            before, after = list(around.shape), [0] * len(low)
            before[axis], after[axis] = starts[axis], starts[axis] + slab.shape[axis]
            slab = self.concatenate(
                [
                    self.slice(around, [0] * len(low), before),
                    slab,
                    self.slice(around, after, around.shape),
                ],
                axis,
            )
        return slab

    def _written_slice(
        self, stacked: SliceUpdates, starts: Shape, limits: Shape
    ) -> ArrayValue | None:
        """Return a slice of an array written in parts; None if it spans several of them."""
        axis = stacked.axis
        start, limit = starts[axis], limits[axis]
        for update_start, update in stacked.parts.items():
            update_end = update_start + update.shape[axis]
            if update_start <= start and limit <= update_end:
                low, high = list(starts), list(limits)
                low[axis], high[axis] = start - update_start, limit - update_start
                return self.slice(update, low, high)
            if update_start < limit and start < update_end:
                return None
        return self.slice(stacked.base, starts, limits)

    def _assemble(self, stacked: SliceUpdates) -> ArrayValue:
        axis, base = stacked.axis, stacked.base
        blocks, next_start = [], 0

        def untouched(start: int, limit: int) -> ArrayValue:
            low, high = [0] * len(base.shape), list(base.shape)
            low[axis], high[axis] = start, limit
            return self.slice(base, low, high)

        for start, update in sorted(stacked.parts.items()):
            if start > next_start:
                blocks.append(untouched(next_start, start))
            blocks.append(update)
            next_start = start + update.shape[axis]
        if next_start < base.shape[axis]:
            blocks.append(untouched(next_start, base.shape[axis]))
        result = self.concatenate(blocks, axis)
        if result.node is None:
            self.node(result)
        return result


def inverse(order: Sequence[int]) -> list[int]:
    """Return the inverse of a permutation."""
    return [int(axis) for axis in np.argsort(order)]


def _unrepeated(data: np.ndarray) -> np.ndarray:
    """Return the elements that a broadcast array repeats, with size 1 along repeated axes."""
    return data[tuple(slice(None) if step else slice(0, 1) for step in data.strides)]


def unsupported(what: str) -> LoweringError:
    """Return the error for an operation that this backend does not support."""
    return LoweringError(f"the Ascend backend does not support {what}")
