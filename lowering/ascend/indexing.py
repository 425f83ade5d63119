"""Reading and writing at indices that are known only at run time.

MindSpore's operators index a single array axis, and shapes must not depend on an index. So the
indexed axes are merged into one, and a linear index over them is computed.
Source: openxla.org/xla/operation_semantics, gather, scatter, dynamic-slice, dynamic-update-slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowering.ascend.emitter import Emitter, inverse, unsupported
from lowering.ascend.values import ArrayValue, constant_value
from lowering.hlo.proto import Message

_SCATTERS = {
    "add": "TensorScatterAdd",
    "maximum": "TensorScatterMax",
    "minimum": "TensorScatterMin",
    "multiply": "TensorScatterMul",
    "assign": "TensorScatterUpdate",
}


def dynamic_slice(
    emit: Emitter, x: ArrayValue, starts: Sequence[ArrayValue], sizes: Sequence[int]
) -> ArrayValue:
    """Read a block; a block that would exceed the bounds is moved inside."""
    low, high = [0] * len(sizes), list(x.shape)
    moving = []
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if start.data is not None:
            low[axis] = _clamp_start(start, x.shape[axis] - size)
            high[axis] = low[axis] + size
        elif size < x.shape[axis]:
            moving.append(axis)
    x = emit.slice(x, low, high)
    for axis in moving:
        first = _clamped(emit, starts[axis], x.shape[axis] - sizes[axis])
        x = emit.gather_axis(
            x, emit.add(first, constant_value(np.arange(sizes[axis]), "s64")), axis
        )
    return x


def dynamic_update_slice(
    emit: Emitter, x: ArrayValue, update: ArrayValue, starts: Sequence[ArrayValue]
) -> ArrayValue:
    """Return x with a block overwritten; a block that would exceed the bounds is moved inside."""
    axes = range(len(x.shape))
    room = [x.shape[axis] - update.shape[axis] for axis in axes]
    if all(starts[axis].data is not None or not room[axis] for axis in axes):
        block_start = [_clamp_start(starts[axis], room[axis]) if room[axis] else 0 for axis in axes]
        return emit.overwrite_block(x, update, block_start)
    # For each element, compute whether it lies in the block, and its position in the block.
    written = None
    for axis in axes:
        if not room[axis]:
            continue
        first = _clamped(emit, starts[axis], room[axis])
        position = emit.subtract(constant_value(np.arange(x.shape[axis]), "s64"), first)
        size = update.shape[axis]
        inside = emit.logical_and(
            emit.compare("GreaterEqual", position, emit.integer(0, position)),
            emit.compare("Less", position, emit.integer(size, position)),
        )
        index = emit.minimum(
            emit.maximum(position, emit.integer(0, position)), emit.integer(size - 1, position)
        )
        update = emit.gather_axis(update, index, axis)
        along = [1] * len(x.shape)
        along[axis] = x.shape[axis]
        inside = emit.reshape(inside, along)
        written = inside if written is None else emit.logical_and(written, inside)
    assert written is not None
    return emit.select(written, update, x)


def gather(emit: Emitter, instruction: Message, x: ArrayValue, indices: ArrayValue) -> ArrayValue:
    """Read blocks at indices; blocks that would exceed the bounds are moved inside."""
    dimension_numbers, sizes = (
        instruction.gather_dimension_numbers,
        list(instruction.gather_slice_sizes),
    )
    batching = list(dimension_numbers.operand_batching_dims)
    indexed = [*batching, *dimension_numbers.start_index_map]
    index, batch_shape = _index_columns(
        emit,
        indices,
        dimension_numbers.index_vector_dim,
        dimension_numbers.start_indices_batching_dims,
    )
    other_axes = [axis for axis in range(len(x.shape)) if axis not in indexed]
    x = emit.slice(x, [0] * len(sizes), [
        x.shape[axis] if axis in indexed else sizes[axis] for axis in range(len(sizes))
    ])  # fmt: skip
    table = _merge_indexed_axes(emit, x, indexed, other_axes)
    # After the batch axes, one axis for each indexed axis, with the size of the block.
    window = [sizes[axis] for axis in indexed]
    linear = None
    for column, axis in enumerate(indexed):
        first = _clamped(emit, index[column], x.shape[axis] - sizes[axis])
        axis_index = _window_indices(emit, first, window, column)
        linear = _linear_index(emit, linear, axis_index, x.shape[axis])
    assert linear is not None
    linear = emit.broadcast_to(linear, (*batch_shape, *window))
    gathered = emit.gather_axis(table, linear, 0)
    # Now (batch, indexed axes, other axes): drop the collapsed axes, move the offset axes.
    collapsed = {*dimension_numbers.collapsed_slice_dims, *batching}
    uncollapsed_axes = [axis for axis in (*indexed, *other_axes) if axis not in collapsed]
    gathered = emit.reshape(gathered, (*batch_shape, *(sizes[axis] for axis in uncollapsed_axes)))
    offsets = iter(sorted(dimension_numbers.offset_dims))
    target_axes = {
        len(batch_shape) + uncollapsed_axes.index(axis): next(offsets)
        for axis in sorted(uncollapsed_axes)
    }
    return _move_axes(emit, gathered, target_axes, len(batch_shape))


def scatter(
    emit: Emitter,
    instruction: Message,
    kind: str,
    x: ArrayValue,
    indices: ArrayValue,
    updates: ArrayValue,
) -> ArrayValue:
    """Combine updates with an array at indices; updates that exceed the bounds are skipped.

    `kind` is the operation: add, maximum, minimum, multiply or assign.
    """
    if kind not in _SCATTERS:
        raise unsupported(f"a scatter that combines by {kind}")
    dimension_numbers = instruction.scatter_dimension_numbers
    batching = list(dimension_numbers.input_batching_dims)
    indexed = [*batching, *dimension_numbers.scatter_dims_to_operand_dims]
    other_axes = [axis for axis in range(len(x.shape)) if axis not in indexed]
    index, batch_shape = _index_columns(
        emit,
        indices,
        dimension_numbers.index_vector_dim,
        dimension_numbers.scatter_indices_batching_dims,
    )
    window_axes = list(dimension_numbers.update_window_dims)
    inserted_axes = {*dimension_numbers.inserted_window_dims, *batching}
    operand_window_axes = [axis for axis in range(len(x.shape)) if axis not in inserted_axes]
    size_of = {
        axis: updates.shape[update_axis]
        for axis, update_axis in zip(operand_window_axes, window_axes, strict=True)
    }
    if any(size_of[axis] != x.shape[axis] for axis in other_axes):
        raise unsupported("a scatter of blocks that do not span all axes without an index")
    window = [size_of.get(axis, 1) for axis in indexed]
    linear, inside = None, None
    for column, axis in enumerate(indexed):
        last = emit.integer(x.shape[axis] - window[column], index[column])
        fits = emit.logical_and(
            emit.compare("GreaterEqual", index[column], emit.integer(0, index[column])),
            emit.compare("LessEqual", index[column], last),
        )
        inside = fits if inside is None else emit.logical_and(inside, fits)
        axis_index = _window_indices(
            emit, _clamped(emit, index[column], x.shape[axis] - window[column]), window, column
        )
        linear = _linear_index(emit, linear, axis_index, x.shape[axis])
    assert linear is not None and inside is not None
    full = (*batch_shape, *window)
    linear = emit.broadcast_to(linear, full)
    inside = emit.reshape(inside, (*inside.shape, *(1 for _ in window)))
    count = int(np.prod([x.shape[axis] for axis in indexed], dtype=np.int64))
    # Updates out of bounds go to an extra row, which is removed again.
    linear = emit.select(emit.broadcast_to(inside, full), linear, emit.integer(count, linear))
    batch_axes = [axis for axis in range(len(updates.shape)) if axis not in window_axes]
    order = [
        window_axes[operand_window_axes.index(axis)]
        for axis in (*indexed, *other_axes)
        if axis in size_of
    ]
    updates = emit.transpose(updates, batch_axes + order)
    tail = [x.shape[axis] for axis in other_axes]
    updates = emit.reshape(updates, (int(np.prod(full, dtype=np.int64)), *tail))
    table = _merge_indexed_axes(emit, x, indexed, other_axes)
    spare = emit.broadcast_to(
        emit.literal(np.zeros((1,) * len(table.shape)), table.dtype), (1, *tail)
    )
    table = emit.concatenate([table, spare], 0)
    rows = emit.reshape(linear, (-1 if not full else int(np.prod(full, dtype=np.int64)), 1))
    operator = _SCATTERS[kind]
    result_dtype = table.dtype
    if result_dtype == "pred":
        table, updates = emit.cast(table, "s32"), emit.cast(updates, "s32")
    result = emit.apply(operator, [table, rows, updates], table.shape, table.dtype)
    result = emit.cast(result, result_dtype)
    result = emit.slice(result, [0] * len(table.shape), [count, *tail])
    result = emit.reshape(result, [x.shape[axis] for axis in (*indexed, *other_axes)])
    return emit.transpose(result, inverse([*indexed, *other_axes]))


def _index_columns(
    emit: Emitter, indices: ArrayValue, vector_axis: int, batching: Sequence[int]
) -> tuple[list[ArrayValue], tuple[int, ...]]:
    """Return the indices of each indexed axis over the batch: first the batching axes, as iota."""
    indices = emit.cast(indices, "s64")
    if vector_axis == len(indices.shape):
        indices = emit.reshape(indices, (*indices.shape, 1))
    order = [axis for axis in range(len(indices.shape)) if axis != vector_axis]
    indices = emit.transpose(indices, [*order, vector_axis])
    batch_shape = indices.shape[:-1]
    columns = []
    for axis in batching:
        along = [1] * len(batch_shape)
        batch_axis = axis - (axis > vector_axis)
        along[batch_axis] = batch_shape[batch_axis]
        counted = constant_value(np.arange(batch_shape[batch_axis]).reshape(along), "s64")
        columns.append(emit.broadcast_to(counted, batch_shape))
    for column in range(indices.shape[-1]):
        low, high = [0] * len(batch_shape), list(batch_shape)
        one = emit.slice(indices, [*low, column], [*high, column + 1])
        columns.append(emit.reshape(one, batch_shape))
    return columns, batch_shape


def _merge_indexed_axes(
    emit: Emitter, x: ArrayValue, indexed: list[int], other_axes: list[int]
) -> ArrayValue:
    """Move the indexed axes to the front and merge them into one."""
    count = int(np.prod([x.shape[axis] for axis in indexed], dtype=np.int64))
    return emit.reshape(
        emit.transpose(x, indexed + other_axes), (count, *(x.shape[axis] for axis in other_axes))
    )


def _window_indices(
    emit: Emitter, first: ArrayValue, window: Sequence[int], window_axis: int
) -> ArrayValue:
    """Add the window axes to the first indices, which then count up along `window_axis`."""
    first = emit.reshape(first, (*first.shape, *(1 for _ in window)))
    if window[window_axis] == 1:
        return first
    along = [1] * len(window)
    along[window_axis] = window[window_axis]
    return emit.add(first, constant_value(np.arange(window[window_axis]).reshape(along), "s64"))


def _linear_index(
    emit: Emitter, previous: ArrayValue | None, axis_index: ArrayValue, size: int
) -> ArrayValue:
    """Return the linear index over the previous axes and one more."""
    if previous is None:
        return axis_index
    return emit.add(emit.multiply(previous, emit.integer(size, previous)), axis_index)


def _move_axes(emit: Emitter, x: ArrayValue, target_axes: dict[int, int], batch: int) -> ArrayValue:
    """Move axes to their positions; batch axes fill the other positions in order."""
    assigned = set(target_axes.values())
    free = iter(position for position in range(len(x.shape)) if position not in assigned)
    target = [
        target_axes.get(axis) if axis >= batch else next(free) for axis in range(len(x.shape))
    ]
    return emit.transpose(x, inverse([int(position or 0) for position in target]))


def _clamped(emit: Emitter, start: ArrayValue, room: int) -> ArrayValue:
    start = emit.cast(start, "s64")
    return emit.minimum(emit.maximum(start, emit.integer(0, start)), emit.integer(room, start))


def _clamp_start(start: ArrayValue, room: int) -> int:
    assert start.data is not None
    return min(max(int(start.data), 0), room)
