"""Collectives: HCCL's operators for Ascend devices, sums of masked arrays for CPUs.

On CPUs, MindSpore supports only an AllReduce that sums. There each rank writes its value into its
row of an array of zeros, and the sum of these arrays contains the values of all ranks. Groups are
numbered; a loader replaces each number by the name of the group that contains its rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowering.ascend.emitter import Emitter, inverse, unsupported
from lowering.ascend.mindir import TensorInfo
from lowering.ascend.operations import hlo_type, reduce, shape_of, to_signed, wrap_to_hlo_type
from lowering.ascend.values import ArrayValue, constant_value
from lowering.hlo.proto import Message
from lowering.hlo.replica_groups import Groups

_HCCL = {
    "add": "sum",
    "maximum": "max",
    "minimum": "min",
    "multiply": "prod",
    "or": "max",
    "and": "min",
}
EXCHANGE = "graphtrain.exchange"  # attribute that the loader replaces by those that differ by rank
_ALL_REDUCE_TYPES = ("f32", "f16")  # types that AllReduce supports on a CPU


class Collectives:
    """Writer of collectives; records the groups and exchanges that a loader fills in."""

    def __init__(self, emit: Emitter, ranks: int, rank: ArrayValue | None) -> None:
        """Create a writer; `rank` is the input with the program's own rank, if it has one."""
        self._emit, self._ranks = emit, ranks
        self.rank = rank
        self.groups: list[Groups] = []
        self.exchanges: list[list[int]] = []  # each: source rank by rank

    def all_reduce(self, instruction: Message, kind: str, x: ArrayValue) -> ArrayValue:
        """Translate all-reduce of one array by the operation `kind`."""
        groups = _groups(instruction)
        if len(groups[0]) == 1:
            return x
        emit, shape, dtype = self._emit, x.shape, x.dtype
        if emit.native or (kind == "add" and dtype in _ALL_REDUCE_TYPES):
            x = emit.cast(x, "s32") if dtype == "pred" else x
            x = emit.reshape(x, shape or (1,))  # AllReduce accepts no scalars
            attributes = self._attributes(groups) | {"op": _HCCL[kind]}
            x = emit.apply("AllReduce", [x], x.shape, x.dtype, attributes)
            x = emit.reshape(x, shape)
            x = emit.cast(x, dtype) if dtype == "pred" else x
            return wrap_to_hlo_type(emit, x, hlo_type(instruction))
        return reduce(emit, kind, self._gather_from_group(groups, x), [0], hlo_type(instruction))

    def all_gather(self, instruction: Message, x: ArrayValue) -> ArrayValue:
        """Translate all-gather along one array axis."""
        groups, (axis,) = _groups(instruction), instruction.dimensions
        gathered = self._gather_from_group(groups, x)
        return self._emit.reshape(_move_axis(self._emit, gathered, 0, axis), shape_of(instruction))

    def reduce_scatter(self, instruction: Message, kind: str, x: ArrayValue) -> ArrayValue:
        """Translate reduce-scatter along one array axis by the operation `kind`."""
        groups, (axis,) = _groups(instruction), instruction.dimensions
        emit, count = self._emit, len(groups[0])
        order = [axis, *(a for a in range(len(x.shape)) if a != axis)]
        axis_first = emit.transpose(x, order)
        shape = (axis_first.shape[0] // count, *axis_first.shape[1:])
        if emit.native:
            attributes = self._attributes(groups) | {"op": _HCCL[kind], "rank_size": count}
            shard = emit.apply("ReduceScatter", [axis_first], shape, x.dtype, attributes)
        else:
            reduced = reduce(
                emit, kind, self._gather_from_group(groups, axis_first), [0], hlo_type(instruction)
            )
            blocks = emit.reshape(reduced, (count, *shape))
            shard = emit.reshape(
                emit.gather_axis(blocks, self._position_in_group(groups), 0), shape
            )
        return wrap_to_hlo_type(emit, emit.transpose(shard, inverse(order)), hlo_type(instruction))

    def all_to_all(self, instruction: Message, operands: Sequence[ArrayValue]) -> Any:
        """Translate all-to-all of one operand split along an axis, or of one operand per rank."""
        groups, emit = _groups(instruction), self._emit
        count = len(groups[0])
        if len(operands) > 1 or not instruction.dimensions:
            parts = emit.concatenate([emit.reshape(x, (1, *x.shape)) for x in operands], 0)
            parts = self._exchanged(groups, parts)
            return tuple(
                emit.reshape(_row(emit, parts, index), x.shape) for index, x in enumerate(operands)
            )
        (x,), (axis,) = operands, instruction.dimensions
        split = emit.reshape(
            x, (*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
        )
        parts = self._exchanged(groups, _move_axis(emit, split, axis, 0))
        return emit.reshape(_move_axis(emit, parts, 0, axis), x.shape)

    def _exchanged(self, groups: Groups, parts: ArrayValue) -> ArrayValue:
        """Exchange parts so that rank i has part i of every rank: (ranks, ...) to (ranks, ...)."""
        emit, count = self._emit, len(groups[0])
        if emit.native:
            attributes = self._attributes(groups) | {
                "concat_dim": 0,
                "split_count": count,
                "split_dim": 0,
            }
            return emit.apply("AlltoAll", [parts], parts.shape, parts.dtype, attributes)
        gathered = self._gather_from_group(groups, parts)
        received = emit.gather_axis(gathered, self._position_in_group(groups), 1)
        return emit.reshape(received, parts.shape)

    def permute(self, instruction: Message, x: ArrayValue) -> ArrayValue:
        """Translate collective-permute; ranks to which no rank sends receive zeros."""
        emit = self._emit
        pairs = [[pair.source, pair.target] for pair in instruction.source_target_pairs]
        sources = np.full(self._ranks, -1)
        for source, target in pairs:
            sources[target] = source
        if emit.native and (sources >= 0).all():
            return self._sent(sources, x)
        source = emit.gather_axis(constant_value(sources, "s64"), self._own_rank(), 0)
        if emit.native:
            received = self._sent(sources, x)
        else:
            gathered = self._gather_from_group((tuple(range(self._ranks)),), x)
            received = emit.gather_axis(gathered, emit.maximum(source, emit.integer(0, source)), 0)
            received = emit.reshape(received, x.shape)
        if (sources >= 0).all():
            return received
        has_source = emit.compare("GreaterEqual", source, emit.integer(0, source))
        has_source = emit.reshape(has_source, (1,) * len(x.shape))
        return emit.select(has_source, received, emit.broadcast_to(
            emit.literal(np.zeros((1,) * len(x.shape)), x.dtype), x.shape))  # fmt: skip

    def _sent(self, sources: np.ndarray, x: ArrayValue) -> ArrayValue:
        """Send by NeighborExchange, in which every rank sends once and receives once.

        Ranks without a source receive unused values from ranks without a target.
        """
        idle = iter(sorted(set(range(self._ranks)) - set(sources.tolist())))
        all_sources = [int(source) if source >= 0 else next(idle) for source in sources]
        self.exchanges.append(all_sources)
        world = self._attributes((tuple(range(self._ranks)),))
        attributes = {
            "group": world["group"],
            EXCHANGE: len(self.exchanges) - 1,
            "recv_shapes": [list(x.shape)],
            "send_shapes": [list(x.shape)],
        }
        writer, tensor = self._emit.writer, TensorInfo(x.shape, x.dtype)
        send_tuple = writer.node("MakeTuple", [self._emit.node(x)], [tensor])
        received_tuple = writer.node("NeighborExchange", [send_tuple], [tensor], attributes)
        return self._emit.tuple_element(received_tuple, 0, tensor)

    def _gather_from_group(self, groups: Groups, x: ArrayValue) -> ArrayValue:
        """Gather x from all ranks of the group, in group order: (ranks of the group, *shape)."""
        emit, count = self._emit, len(groups[0])
        shape = (count, *x.shape)
        if count == 1:
            return emit.reshape(x, shape)
        if emit.native:
            attributes = self._attributes(groups) | {"rank_size": count}
            shard = emit.reshape(emit.cast(x, "s8") if x.dtype == "pred" else x, (1, *x.shape))
            gathered = emit.apply("AllGather", [shard], shape, shard.dtype, attributes)
            return emit.cast(gathered, x.dtype) if x.dtype == "pred" else gathered
        if x.dtype not in _ALL_REDUCE_TYPES:
            return self._gather_integers(groups, x)
        positions = constant_value(np.arange(count).reshape(count, *(1 for _ in x.shape)), "s64")
        is_own = emit.compare("Equal", positions, self._position_in_group(groups))
        zero = emit.literal(np.zeros((1,) * len(shape)), x.dtype)
        placed = emit.select(is_own, emit.reshape(x, (1, *x.shape)), zero)
        attributes = self._attributes(groups) | {"op": "sum"}
        return emit.apply("AllReduce", [placed], shape, x.dtype, attributes)

    def _gather_integers(self, groups: Groups, x: ArrayValue) -> ArrayValue:
        """Gather integers, 16 bits at a time, which float32 represents exactly."""
        emit, stored = self._emit, x.dtype
        if stored in ("f64", "bf16"):
            raise unsupported(f"a collective of {stored} on a CPU")
        wide, result = emit.cast(x, "s64"), None
        for shift in range(0, 64 if stored == "s64" else 32, 16):
            by, mask = emit.integer(shift, wide), emit.integer(0xFFFF, wide)
            bits = emit.elementwise("RightShift", np.right_shift, [wide, by]) if shift else wide
            bits = emit.elementwise("BitwiseAnd", np.bitwise_and, [bits, mask])
            gathered = emit.cast(self._gather_from_group(groups, emit.cast(bits, "f32")), "s64")
            gathered = (
                emit.elementwise("LeftShift", np.left_shift, [gathered, by]) if shift else gathered
            )
            result = gathered if result is None else emit.add(result, gathered)
        assert result is not None
        if stored == "s64":
            return result
        return emit.cast(to_signed(emit, result), stored)

    def _position_in_group(self, groups: Groups) -> ArrayValue:
        """Return this rank's position in its group, as an array of one element."""
        positions = np.zeros(self._ranks, np.int64)
        for group in groups:
            positions[list(group)] = range(len(group))
        return self._emit.gather_axis(constant_value(positions, "s64"), self._own_rank(), 0)

    def _own_rank(self) -> ArrayValue:
        if self.rank is None:
            raise unsupported("this collective in a program without its rank as an input")
        return self._emit.reshape(self.rank, (1,))

    def _attributes(self, groups: Groups) -> dict[str, Any]:
        if groups not in self.groups:
            self.groups.append(groups)
        group_index = self.groups.index(groups)
        return {"group": placeholder(group_index), "fusion": 0, "index": 0, "no_eliminate": True}


def placeholder(number: int) -> str:
    """Return the placeholder for the name of a group in a graph."""
    return f"graphtrain.group.{number}"


def _groups(instruction: Message) -> Groups:
    return tuple(tuple(group.replica_ids) for group in instruction.replica_groups)


def _move_axis(emit: Emitter, x: ArrayValue, source: int, target: int) -> ArrayValue:
    order = [axis for axis in range(len(x.shape)) if axis != source]
    order.insert(target, source)
    return emit.transpose(x, order)


def _row(emit: Emitter, x: ArrayValue, index: int) -> ArrayValue:
    row_shape = x.shape[1:]
    return emit.slice(x, [index] + [0] * len(row_shape), [index + 1, *row_shape])
