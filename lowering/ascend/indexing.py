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
        at = [_clamp_start(starts[axis], room[axis]) if room[axis] else 0 for axis in axes]
        return emit.overwrite_block(x, update, at)
    # For each element, compute whether it lies in the block, and its position in the block.
    written = None
    for axis in axes:
        if not room[axis]:
            continue
        first = _clamped(emit, starts[axis], room[axis])
        place = emit.subtract(constant_value(np.arange(x.shape[axis]), "s64"), first)
        size = update.shape[axis]
        inside = emit.logical_and(
            emit.compare("GreaterEqual", place, emit.integer(0, place)),
            emit.compare("Less", place, emit.integer(size, place)),
        )
        index = emit.minimum(
            emit.maximum(place, emit.integer(0, place)), emit.integer(size - 1, place)
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
    numbers, sizes = instruction.gather_dimension_numbers, list(instruction.gather_slice_sizes)
    batching = list(numbers.operand_batching_dims)
    indexed = [*batching, *numbers.start_index_map]
    index, batch_shape = _index_columns(
        emit, indices, numbers.index_vector_dim, numbers.start_indices_batching_dims
    )
    rest = [axis for axis in range(len(x.shape)) if axis not in indexed]
    x = emit.slice(x, [0] * len(sizes), [
        x.shape[axis] if axis in indexed else sizes[axis] for axis in range(len(sizes))
    ])  # fmt: skip
    table = _merge_indexed_axes(emit, x, indexed, rest)
    # After the batch axes, one axis for each indexed axis, with the size of the block.
    window = [sizes[axis] for axis in indexed]
    linear = None
    for number, axis in enumerate(indexed):
        first = _clamped(emit, index[number], x.shape[axis] - sizes[axis])
        place = _window_indices(emit, first, window, number)
        linear = _linear_index(emit, linear, place, x.shape[axis])
    assert linear is not None
    linear = emit.broadcast_to(linear, (*batch_shape, *window))
    found = emit.gather_axis(table, linear, 0)
    # Now (batch, indexed axes, other axes): drop the collapsed axes, move the offset axes.
    collapsed = {*numbers.collapsed_slice_dims, *batching}
    kept = [axis for axis in (*indexed, *rest) if axis not in collapsed]
    found = emit.reshape(found, (*batch_shape, *(sizes[axis] for axis in kept)))
    offsets = iter(sorted(numbers.offset_dims))
    places = {len(batch_shape) + kept.index(axis): next(offsets) for axis in sorted(kept)}
    return _move_axes(emit, found, places, len(batch_shape))


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
    numbers = instruction.scatter_dimension_numbers
    batching = list(numbers.input_batching_dims)
    indexed = [*batching, *numbers.scatter_dims_to_operand_dims]
    rest = [axis for axis in range(len(x.shape)) if axis not in indexed]
    index, batch_shape = _index_columns(
        emit, indices, numbers.index_vector_dim, numbers.scatter_indices_batching_dims
    )
    window_axes = list(numbers.update_window_dims)
    gone = {*numbers.inserted_window_dims, *batching}
    kept = [axis for axis in range(len(x.shape)) if axis not in gone]
    size_of = {axis: updates.shape[at] for axis, at in zip(kept, window_axes, strict=True)}
    if any(size_of[axis] != x.shape[axis] for axis in rest):
        raise unsupported("a scatter of blocks that do not span all axes without an index")
    window = [size_of.get(axis, 1) for axis in indexed]
    linear, inside = None, None
    for number, axis in enumerate(indexed):
        last = emit.integer(x.shape[axis] - window[number], index[number])
        fits = emit.logical_and(
            emit.compare("GreaterEqual", index[number], emit.integer(0, index[number])),
            emit.compare("LessEqual", index[number], last),
        )
        inside = fits if inside is None else emit.logical_and(inside, fits)
        place = _window_indices(
            emit, _clamped(emit, index[number], x.shape[axis] - window[number]), window, number
        )
        linear = _linear_index(emit, linear, place, x.shape[axis])
    assert linear is not None and inside is not None
    full = (*batch_shape, *window)
    linear = emit.broadcast_to(linear, full)
    inside = emit.reshape(inside, (*inside.shape, *(1 for _ in window)))
    count = int(np.prod([x.shape[axis] for axis in indexed], dtype=np.int64))
    # Updates out of bounds go to an extra row, which is removed again.
    linear = emit.select(emit.broadcast_to(inside, full), linear, emit.integer(count, linear))
    others = [axis for axis in range(len(updates.shape)) if axis not in window_axes]
    order = [window_axes[kept.index(axis)] for axis in (*indexed, *rest) if axis in size_of]
    updates = emit.transpose(updates, others + order)
    tail = [x.shape[axis] for axis in rest]
    updates = emit.reshape(updates, (int(np.prod(full, dtype=np.int64)), *tail))
    table = _merge_indexed_axes(emit, x, indexed, rest)
    spare = emit.broadcast_to(
        emit.literal(np.zeros((1,) * len(table.shape)), table.dtype), (1, *tail)
    )
    table = emit.concatenate([table, spare], 0)
    rows = emit.reshape(linear, (-1 if not full else int(np.prod(full, dtype=np.int64)), 1))
    operator = _SCATTERS[kind]
    kept_as = table.dtype
    if kept_as == "pred":
        table, updates = emit.cast(table, "s32"), emit.cast(updates, "s32")
    result = emit.apply(operator, [table, rows, updates], table.shape, table.dtype)
    result = emit.cast(result, kept_as)
    result = emit.slice(result, [0] * len(table.shape), [count, *tail])
    result = emit.reshape(result, [x.shape[axis] for axis in (*indexed, *rest)])
    return emit.transpose(result, inverse([*indexed, *rest]))


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
        place = axis - (axis > vector_axis)
        along[place] = batch_shape[place]
        counted = constant_value(np.arange(batch_shape[place]).reshape(along), "s64")
        columns.append(emit.broadcast_to(counted, batch_shape))
    for column in range(indices.shape[-1]):
        low, high = [0] * len(batch_shape), list(batch_shape)
        one = emit.slice(indices, [*low, column], [*high, column + 1])
        columns.append(emit.reshape(one, batch_shape))
    return columns, batch_shape


def _merge_indexed_axes(
    emit: Emitter, x: ArrayValue, indexed: list[int], rest: list[int]
) -> ArrayValue:
    """Move the indexed axes to the front and merge them into one."""
    count = int(np.prod([x.shape[axis] for axis in indexed], dtype=np.int64))
    return emit.reshape(
        emit.transpose(x, indexed + rest), (count, *(x.shape[axis] for axis in rest))
    )


def _window_indices(
    emit: Emitter, first: ArrayValue, window: Sequence[int], number: int
) -> ArrayValue:
    """Add an axis for each window axis to first indices, which count up along axis `number`."""
    first = emit.reshape(first, (*first.shape, *(1 for _ in window)))
    if window[number] == 1:
        return first
    along = [1] * len(window)
    along[number] = window[number]
    return emit.add(first, constant_value(np.arange(window[number]).reshape(along), "s64"))


def _linear_index(
    emit: Emitter, before: ArrayValue | None, place: ArrayValue, size: int
) -> ArrayValue:
    """Return the linear index over the previous axes and one more."""
    if before is None:
        return place
    return emit.add(emit.multiply(before, emit.integer(size, before)), place)


def _move_axes(emit: Emitter, found: ArrayValue, places: dict[int, int], batch: int) -> ArrayValue:
    """Move axes to their positions; batch axes fill the other positions in order."""
    taken = set(places.values())
    free = iter(place for place in range(len(found.shape)) if place not in taken)
    target = [places.get(axis) if axis >= batch else next(free) for axis in range(len(found.shape))]
    return emit.transpose(found, inverse([int(place or 0) for place in target]))


def _clamped(emit: Emitter, start: ArrayValue, room: int) -> ArrayValue:
    start = emit.cast(start, "s64")
    return emit.minimum(emit.maximum(start, emit.integer(0, start)), emit.integer(room, start))


def _clamp_start(start: ArrayValue, room: int) -> int:
    assert start.data is not None
    return min(max(int(start.data), 0), room)
