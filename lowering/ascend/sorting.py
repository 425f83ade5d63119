"""Sorting, top-k, argmax and argmin, and running sums and maxima."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lowering.ascend.emitter import Emitter, inverse, unsupported
from lowering.ascend.mindir import TensorInfo
from lowering.ascend.operations import FLOATS, hlo_type, shape_of, wrap_to_hlo_type
from lowering.ascend.values import ArrayValue, constant_value
from lowering.hlo.proto import Message

Evaluate = Callable[[Sequence[ArrayValue]], ArrayValue]  # compares two elements of each operand


def is_ascending(evaluate: Evaluate, operands: Sequence[ArrayValue]) -> bool:
    """Return whether a comparison sorts in ascending order, by evaluating it on examples.

    Raises:
        LoweringError: the comparison does not order by its first operand alone.
    """

    def comparison_holds(*pairs: tuple[int, int]) -> bool:
        scalars = [
            constant_value(np.array(scalar).astype(_numpy(x)), x.dtype)
            for x, pair in zip(operands, pairs, strict=True)
            for scalar in pair
        ]
        answer = evaluate(scalars)
        return answer.data is not None and bool(answer.data)

    ties = [(1, 1)] * (len(operands) - 1)
    up, down = comparison_holds((1, 2), *ties), comparison_holds((2, 1), *ties)
    if up == down:
        raise unsupported("a sort by this comparison")
    for key_index in range(len(ties)):
        for pair in ((1, 2), (2, 1)):
            other_pairs = [pair if n == key_index else (1, 1) for n in range(len(ties))]
            if comparison_holds((1, 1), *other_pairs) and not _is_iota(operands[1 + key_index]):
                raise unsupported("a sort by several keys")
    return up


def _numpy(x: ArrayValue) -> type:
    return {"f32": np.float32, "f16": np.float16, "f64": np.float64}.get(x.dtype, np.int64)


def _is_iota(x: ArrayValue) -> bool:
    """Return whether x contains the index of each element, which orders ties as a stable sort."""
    if x.data is None or not x.shape:
        return False
    return any(
        (np.diff(x.data, axis=axis) == 1).all() and x.shape[axis] > 1
        for axis in range(len(x.shape))
    )


def sort(emit: Emitter, instruction: Message, evaluate: Evaluate, operands: Sequence[ArrayValue]):
    """Sort along one axis by the first operand, and reorder the other operands alike."""
    (axis,) = instruction.dimensions
    axis, key = int(axis), operands[0]
    descending = not is_ascending(evaluate, operands)
    order = _sort_indices(emit, key, axis, descending)
    results = [_take_along_axis(emit, x, order, axis) for x in operands]
    return results[0] if len(results) == 1 else tuple(results)


def _sort_indices(emit: Emitter, key: ArrayValue, axis: int, descending: bool) -> ArrayValue:
    """Return the indices that sort `key`; ties keep their order, and NaN counts as greatest.

    MindSpore's Sort does not define the order of ties, so each element's position is counted: how
    many elements are smaller, or equal and before it. This is quadratic, and meant for the few
    experts of a mixture of experts.
    """
    size = key.shape[axis]
    if key.dtype == "pred":
        key = emit.cast(key, "s32")
    other_axes = [a for a in range(len(key.shape)) if a != axis]
    rows = emit.transpose(key, [*other_axes, axis])
    keys_by_row = emit.reshape(rows, (*rows.shape, 1))
    keys_by_column = emit.reshape(rows, (*rows.shape[:-1], 1, size))
    before = constant_value(np.arange(size)[None, :] < np.arange(size)[:, None], "pred")
    before = emit.broadcast_to(before, (*rows.shape[:-1], size, size))
    less, equal = _less_and_equal(
        emit, *((keys_by_row, keys_by_column) if descending else (keys_by_column, keys_by_row))
    )
    ahead = emit.logical_or(less, emit.logical_and(equal, before))
    counted = emit.cast(ahead, "f32")
    sorted_position = emit.apply(
        "ReduceSum", [counted, (len(rows.shape),), False, False], rows.shape, "f32"
    )
    # Exactly one element has sorted_position == p, for each position p.
    positions = constant_value(np.arange(size, dtype=np.float32).reshape(size, 1), "f32")
    is_at = emit.compare(
        "Equal", emit.reshape(sorted_position, (*rows.shape[:-1], 1, size)), positions
    )
    indices = constant_value(np.arange(size, dtype=np.float32), "f32")
    weighted = emit.multiply(emit.cast(is_at, "f32"), indices)
    order = emit.apply("ReduceSum", [weighted, (len(rows.shape),), False, False], rows.shape, "f32")
    order = emit.cast(order, "s64")
    return emit.transpose(order, inverse([*other_axes, axis]))


def _less_and_equal(emit: Emitter, a: ArrayValue, b: ArrayValue) -> tuple[ArrayValue, ArrayValue]:
    """Return whether a sorts before b, and whether they are equal, in ascending order."""
    less, equal = emit.compare("Less", a, b), emit.compare("Equal", a, b)
    if a.dtype not in FLOATS:
        return less, equal
    a_is_nan, b_is_nan = (emit.compare("NotEqual", x, x) for x in (a, b))
    a_is_number = emit.elementwise("LogicalNot", np.logical_not, [a_is_nan], "pred")
    return emit.logical_or(less, emit.logical_and(a_is_number, b_is_nan)), emit.logical_or(
        equal, emit.logical_and(a_is_nan, b_is_nan)
    )


def _take_along_axis(emit: Emitter, x: ArrayValue, order: ArrayValue, axis: int) -> ArrayValue:
    stored = x.dtype
    x = emit.cast(x, "s32") if stored == "pred" else x
    return emit.cast(emit.apply("GatherD", [x, axis, order], x.shape, x.dtype), stored)


def top_k(emit: Emitter, instruction: Message, x: ArrayValue) -> tuple[ArrayValue, ArrayValue]:
    """Return the largest elements along the last axis, largest first, and their indices."""
    values = instruction.shape.tuple_shapes[0]
    k = values.dimensions[-1]
    order = _sort_indices(emit, x, len(x.shape) - 1, descending=True)
    low, high = [0] * len(x.shape), [*x.shape[:-1], k]
    order = emit.slice(order, low, high)
    top_values = emit.apply("GatherD", [x, len(x.shape) - 1, order], values.dimensions, x.dtype)
    return top_values, emit.cast(order, "s32")


def arg_extreme(
    emit: Emitter, evaluate: Callable[[Sequence[ArrayValue]], tuple[ArrayValue, ArrayValue]],
    operands: Sequence[ArrayValue], axes: Sequence[int],
) -> tuple[ArrayValue, ArrayValue]:  # fmt: skip
    """Translate argmax or argmin, which reduces elements and their indices together.

    Raises:
        LoweringError: the reduction of several arrays is another one.
    """
    x, indices = operands[:2]
    if len(operands) != 4 or len(axes) != 1 or not _is_iota(indices):
        raise unsupported("a reduction of several arrays other than argmax and argmin")
    one, two = (constant_value(np.array(v).astype(_numpy(x)), x.dtype) for v in (1, 2))
    zero = emit.integer(0, indices)
    chosen, _ = evaluate([one, zero, two, zero])
    if chosen.data is None:
        raise unsupported("a reduction of several arrays other than argmax and argmin")
    is_max = int(chosen.data) == 2
    (axis,) = axes
    shape = tuple(size for a, size in enumerate(x.shape) if a != axis)
    stored = x.dtype
    x = emit.cast(x, "s32") if stored == "pred" else x
    extreme = emit.apply(
        "ReduceMax" if is_max else "ReduceMin", [x, (axis,), False], shape, x.dtype
    )
    # Of equal elements the first: the smallest index.
    along = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    is_best = emit.compare("Equal", x, emit.reshape(extreme, along))
    if x.dtype in FLOATS:  # NaN counts as the extreme
        is_nan = emit.compare("NotEqual", x, x)
        any_nan = emit.apply("ReduceAny", [is_nan, (axis,), False], shape, "pred")
        is_best = emit.select(emit.reshape(any_nan, along), is_nan, is_best)
        extreme = emit.select(any_nan, emit.literal(np.array(np.nan), x.dtype), extreme)
    counted = emit.cast(indices, "f32")
    beyond = constant_value(np.array(float(x.shape[axis]), np.float32), "f32")
    candidates = emit.select(is_best, counted, beyond)
    index = emit.apply("ReduceMin", [candidates, (axis,), False], shape, "f32")
    return emit.cast(extreme, stored), emit.cast(index, indices.dtype)


def running_reduction(emit: Emitter, instruction: Message, kind: str, x: ArrayValue) -> ArrayValue:
    """Translate a running sum or maximum, from either end of one axis.

    Raises:
        LoweringError: the reduce-window is another one.
    """
    error = unsupported("a reduce-window other than a running sum or maximum")
    windows = instruction.window.dimensions
    moving = [axis for axis, window in enumerate(windows) if window.size > 1]
    if len(moving) > 1 or shape_of(instruction) != x.shape:
        raise error
    if not moving:
        return x
    (axis,) = moving
    window = windows[axis]
    size = x.shape[axis]
    forward = window.padding_low == size - 1 and window.padding_high == 0
    backward = window.padding_high == size - 1 and window.padding_low == 0
    if window.size != size or not (forward or backward) or kind not in ("add", "maximum"):
        raise error
    if kind == "add":
        sums = emit.apply("CumSum", [x, axis, False, backward], x.shape, x.dtype)
        return wrap_to_hlo_type(emit, sums, hlo_type(instruction))
    x = emit.reverse(x, (axis,)) if backward else x
    tensors = [TensorInfo(x.shape, x.dtype), TensorInfo(x.shape, "s64")]  # the second: indices
    greatest = emit.apply_multi("Cummax", [x, axis], tensors)[0]
    return emit.reverse(greatest, (axis,)) if backward else greatest
