"""Translate one device's HLO to a MindIR graph, instruction by instruction, with loops unrolled.

Every instruction becomes MindSpore operators, or is evaluated during translation if its operands
are known. Loops whose counter is known are unrolled; others become control flow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowering.ascend import indexing, operations, sorting
from lowering.ascend.attention import FusedAttention
from lowering.ascend.collectives import Collectives
from lowering.ascend.control import Control
from lowering.ascend.emitter import Emitter, unsupported
from lowering.ascend.flow import ControlFlow
from lowering.ascend.literals import literal_to_numpy
from lowering.ascend.mindir import TensorInfo
from lowering.ascend.operations import REDUCERS, hlo_type, shape_of
from lowering.ascend.regions import RegionsOf, find
from lowering.ascend.values import ArrayValue
from lowering.errors import LoweringError
from lowering.hlo.proto import TYPE_NAMES, Message, read_module
from lowering.hlo.replica_groups import Groups
from lowering.per_device.normalize import NormalizedModule, entry_of


@dataclass(frozen=True)
class MindirGraph:
    """A MindIR graph, with what its loader needs or fills in."""

    mindir: bytes
    inputs: tuple[TensorInfo, ...]  # all arguments, as stored; those updated in place are variables
    outputs: tuple[TensorInfo, ...]
    variables: tuple[int, ...]  # indices of the arguments that are variables of the graph
    returned: tuple[int, ...]  # indices of the outputs that the graph returns, in order
    groups: tuple[Groups, ...]  # by the number in their placeholders
    exchanges: tuple[tuple[int, ...], ...]  # by number: the source rank of each rank
    nodes: int
    left: tuple[str, ...]  # why attention regions were not replaced by fused operators


def translate(
    normalised: NormalizedModule, *, name: str, ranks: int, native: bool, in_place: dict[int, int]
) -> MindirGraph:
    """Translate a normalised module to MindIR.

    Args:
        normalised: the module of one device.
        name: name of the graph.
        ranks: number of devices that run it.
        native: True for an Ascend device, False for a CPU.
        in_place: output index to the index of the input that it overwrites.

    Raises:
        LoweringError: an instruction is not supported; the message names its line in the model.
    """
    walk = _Translator(normalised, name, ranks, native)
    arguments = walk.arguments(set(in_place.values()))
    entry = entry_of(walk.module)
    results = walk.run(entry, arguments)
    results = list(results) if isinstance(results, tuple) else [results]
    return walk.finished(arguments, results, in_place)


class _Translator:
    def __init__(self, normalised: NormalizedModule, name: str, ranks: int, native: bool) -> None:
        self.module = read_module(normalised.hlo)
        self.emit = Emitter(name, native=native)
        self._normalised, self._ranks = normalised, ranks
        self._computations = {each.id: each for each in self.module.computations}
        self._instructions = {
            each.id: each
            for computation in self.module.computations
            for each in computation.instructions
        }
        self._types = {
            instruction_id: TYPE_NAMES[each.shape.element_type]
            for instruction_id, each in self._instructions.items()
        }
        self._regions: dict[int, RegionsOf] = {}  # by computation
        self._is_located = False  # the error being raised names its line
        self._attention = FusedAttention(self.emit)
        control = Control(self.emit, lambda: self._collectives.rank, self._elsewhere)
        self._flow = ControlFlow(self.module, self.run, control)
        self._collectives = Collectives(self.emit, ranks, None)

    def arguments(self, written: set[int]) -> list[ArrayValue]:
        """Add the graph's inputs, with variables for those that are updated in place."""
        values = []
        self._variables: dict[int, tuple[str, str]] = {}  # by index: variable, node that reads it
        writer = self.emit.writer
        for index, shape in enumerate(entry_of(self.module).program_shape.parameters):
            dtype = self.emit.storage_type(TYPE_NAMES[shape.element_type])
            tensor = TensorInfo(shape.dimensions, dtype)
            if index in written:
                variable = writer.parameter(f"input{index}", tensor)
                node = writer.reading(variable, tensor)
                self._variables[index] = variable, node
            else:
                node = writer.input(f"input{index}", tensor)
            values.append(ArrayValue(tensor.shape, dtype, node=node))
        if self._normalised.rank_input:
            self._collectives = Collectives(self.emit, self._ranks, values[-1])
        return values

    def finished(
        self,
        arguments: Sequence[ArrayValue],
        results: Sequence[ArrayValue],
        in_place: dict[int, int],
    ) -> MindirGraph:
        """End the graph: assign results to inputs that they overwrite, and return the others."""
        emit, writer = self.emit, self.emit.writer
        returned_indices = [index for index in range(len(results)) if index not in in_place]
        returned = [emit.node(results[index]) for index in returned_indices]
        before = None
        for output, input_index in in_place.items():
            variable, read = self._variables[input_index]
            if results[output].node == read:
                continue  # unchanged
            new_node = emit.node(results[output])
            users = writer.readers_of(read)
            before = writer.node(
                "UpdateState", [before or writer.monad(), read, *users, new_node], None
            )
            tensor = TensorInfo(arguments[input_index].shape, arguments[input_index].dtype)
            assign_node = writer.node(
                "Assign",
                [variable, new_node, before],
                tensor,
                {"side_effect_mem": True},
                ref=f"input{input_index}",
            )
            before = writer.node("UpdateState", [before, assign_node], None)
        tensors = [
            TensorInfo(results[index].shape, results[index].dtype) for index in returned_indices
        ]
        return MindirGraph(
            writer.finish(returned, tensors, before),
            tuple(TensorInfo(one.shape, one.dtype) for one in arguments),
            tuple(TensorInfo(one.shape, one.dtype) for one in results),
            tuple(sorted(self._variables)),
            tuple(returned_indices),
            tuple(self._collectives.groups),
            tuple(tuple(one) for one in self._collectives.exchanges),
            writer.count,
            tuple(sorted(set(self._attention.refusals))),
        )

    def run(self, computation: Message, arguments: Sequence[Any]) -> Any:
        """Translate a computation; return its root, a Value or a tuple of them."""
        values: dict[int, Any] = {}
        marked = self._marked(computation)
        for instruction in computation.instructions:
            if instruction.id not in marked.needed:
                continue
            if instruction.opcode == "parameter":
                values[instruction.id] = arguments[instruction.parameter_number]
                continue
            if region := marked.regions.get(instruction.id):
                results = self._attention.write_region(region, values[region.entry])
                if results is not None:
                    values[instruction.id] = results
                    continue
                for instruction_id in region.instructions:
                    values[instruction_id] = self._located(
                        self._instructions[instruction_id], values
                    )
            values[instruction.id] = self._located(instruction, values)
        return values[computation.root_id]

    def _marked(self, computation: Message) -> RegionsOf:
        """Return the computation's regions; only Ascend devices have operators for them."""
        if computation.id not in self._regions:
            regions = find(computation, ignore_regions=not self.emit.native)
            if regions.unreplaced:
                self._attention.refusals.append(
                    "attention that several devices compute together, with collectives"
                )
            self._regions[computation.id] = regions
        return self._regions[computation.id]

    def _located(self, instruction: Message, values: dict[int, Any]) -> Any:
        """Translate an instruction; errors name the line of the model that it comes from."""
        try:
            return self._instruction(instruction, [values[i] for i in instruction.operand_ids])
        except LoweringError as error:
            line = self._normalised.sources.get(instruction.id)
            if line is None or self._is_located:  # by a called computation
                raise
            self._is_located = True
            operation = f"{instruction.opcode} in {self.module.name}"
            raise LoweringError(f"{line}: {error} ({operation})") from None

    def _instruction(self, instruction: Message, operands: Sequence[Any]) -> Any:
        opcode, emit = instruction.opcode, self.emit
        if opcode in _UNSUPPORTED_FOR_U64 and "u64" in {
            self._types[i] for i in instruction.operand_ids
        }:
            raise unsupported(f"{opcode} of u64")
        if opcode in _ELEMENTARY:
            return _ELEMENTARY[opcode](emit, instruction, *operands)
        if opcode in _STRUCTURAL:
            return _STRUCTURAL[opcode](self, instruction, operands)
        raise unsupported(f"the operation {opcode}")

    # Instructions that call computations.

    def _call(self, instruction: Message, operands: Sequence[Any]) -> Any:
        return self.run(self._computations[instruction.called_computation_ids[0]], operands)

    @contextmanager
    def _elsewhere(self, rank: ArrayValue | None = None) -> Iterator[None]:
        """Translate into a separate graph, where nodes of the current one are not available."""
        before = self._attention.masks, self._collectives.rank
        self._attention.masks, self._collectives.rank = {}, rank
        try:
            yield
        finally:
            self._attention.masks, self._collectives.rank = before

    def _reduce(self, instruction: Message, operands: Sequence[Any]) -> Any:
        axes = [int(axis) for axis in instruction.dimensions]
        if len(operands) == 2:
            kind, dtype = self._combiner(instruction), hlo_type(instruction)
            x = operations.reduce(self.emit, kind, operands[0], axes, dtype)
            return operations.combine_with_initial(self.emit, kind, x, operands[1], dtype)
        return sorting.arg_extreme(self.emit, self._function(instruction), operands, axes)

    def _scatter(self, instruction: Message, operands: Sequence[Any]) -> Any:
        if len(operands) != 3:
            raise unsupported("a scatter of several arrays at once")
        return indexing.scatter(self.emit, instruction, self._combiner(instruction), *operands)

    def _sort(self, instruction: Message, operands: Sequence[Any]) -> Any:
        return sorting.sort(self.emit, instruction, self._function(instruction), operands)

    def _windows(self, instruction: Message, operands: Sequence[Any]) -> Any:
        return sorting.running_reduction(
            self.emit, instruction, self._combiner(instruction), operands[0]
        )

    def _custom(self, instruction: Message, operands: Sequence[Any]) -> Any:
        if instruction.custom_call_target == "TopK":
            return sorting.top_k(self.emit, instruction, operands[0])
        raise unsupported(f"the custom call {instruction.custom_call_target!r}")

    def _function(self, instruction: Message) -> Callable[[Sequence[Any]], Any]:
        """Return the computation that an instruction calls, as a function."""
        called = self._computations[instruction.called_computation_ids[0]]
        return lambda arguments: self.run(called, arguments)

    # Instructions that depend on the type of their operands.

    def _converted(self, instruction: Message, operands: Sequence[Any]) -> Any:
        source = self._types[instruction.operand_ids[0]]
        convert = (
            operations.bitcast if instruction.opcode == "bitcast-convert" else operations.convert
        )
        return convert(self.emit, instruction, operands[0], source)

    def _compared(self, instruction: Message, operands: Sequence[Any]) -> Any:
        dtype, (a, b) = self._types[instruction.operand_ids[0]], operands
        return operations.compare(self.emit, instruction.comparison_direction, a, b, dtype)

    def _combiner(self, instruction: Message) -> str:
        """Return the opcode that combines a reducer's two scalars; "assign" returns the second."""
        body = self._computations[instruction.called_computation_ids[0]]
        root = next(each for each in body.instructions if each.id == body.root_id)
        by_id = {each.id: each for each in body.instructions}
        while root.opcode in ("convert", "copy", "reduce-precision"):  # around the result
            root = by_id[root.operand_ids[0]]
        if root.opcode == "parameter" and root.parameter_number == 1:
            return "assign"
        if root.opcode in REDUCERS:
            return root.opcode
        raise unsupported(f"reduction by {root.opcode}")

    # Collectives.

    def _all_reduce(self, instruction: Message, operands: Sequence[Any]) -> Any:
        kind = self._combiner(instruction)
        results = [self._collectives.all_reduce(instruction, kind, x) for x in operands]
        return results[0] if len(results) == 1 else tuple(results)

    def _reduce_scatter(self, instruction: Message, operands: Sequence[Any]) -> Any:
        return self._collectives.reduce_scatter(
            instruction, self._combiner(instruction), operands[0]
        )


# u64 is stored in a signed type, for which these operations give other results.
_UNSUPPORTED_FOR_U64 = {"divide", "reduce", "reduce-window", "remainder", "scatter", "sort", "topk"}

_Simple = Callable[..., Any]


def _constant(emit: Emitter, instruction: Message) -> ArrayValue:
    return emit.literal(literal_to_numpy(instruction.literal), hlo_type(instruction))


def _slice(emit: Emitter, instruction: Message, x: ArrayValue) -> ArrayValue:
    cuts = instruction.slice_dimensions
    return emit.slice(
        x, [c.start for c in cuts], [c.limit for c in cuts], [c.stride or 1 for c in cuts]
    )


def _finite(emit: Emitter, instruction: Message, x: ArrayValue) -> ArrayValue:
    del instruction
    return emit.elementwise("IsFinite", np.isfinite, [x], "pred")


_ELEMENTARY: dict[str, _Simple] = {
    **dict.fromkeys(operations.UNARY, operations.unary),
    **dict.fromkeys(operations.BINARY, operations.binary),
    **dict.fromkeys(("divide", "remainder"), operations.divide),
    **dict.fromkeys(
        ("shift-left", "shift-right-logical", "shift-right-arithmetic"), operations.shift
    ),
    **dict.fromkeys(("copy", "reduce-precision"), lambda emit, instruction, x: x),
    "and": lambda emit, i, a, b: operations.logical(emit, "and", a, b),
    "or": lambda emit, i, a, b: operations.logical(emit, "or", a, b),
    "xor": lambda emit, i, a, b: operations.logical(emit, "xor", a, b),
    "not": operations.bitwise_not,
    "broadcast": operations.broadcast,
    "clamp": lambda emit, i, low, x, high: operations.clamp(emit, low, x, high),
    "concatenate": lambda emit, i, *xs: emit.concatenate(xs, int(i.dimensions[0])),
    "constant": _constant,
    "dot": operations.dot,
    "gather": indexing.gather,
    "get-tuple-element": lambda emit, i, x: x[i.tuple_index],
    "iota": operations.iota,
    "is-finite": _finite,
    "pad": operations.pad,
    "reshape": lambda emit, i, x: emit.reshape(x, shape_of(i)),
    "reverse": lambda emit, i, x: emit.reverse(x, tuple(int(axis) for axis in i.dimensions)),
    "select": lambda emit, i, c, a, b: emit.select(c, a, b),
    "slice": _slice,
    "transpose": lambda emit, i, x: emit.transpose(x, i.dimensions),
    "tuple": lambda emit, i, *xs: tuple(xs),
}
_STRUCTURAL: dict[str, Callable[[_Translator, Message, Sequence[Any]], Any]] = {
    "all-gather": lambda walk, i, xs: walk._collectives.all_gather(i, xs[0]),
    "all-reduce": _Translator._all_reduce,
    "all-to-all": lambda walk, i, xs: walk._collectives.all_to_all(i, xs),
    "call": _Translator._call,
    "collective-permute": lambda walk, i, xs: walk._collectives.permute(i, xs[0]),
    "bitcast-convert": _Translator._converted,
    "compare": _Translator._compared,
    "conditional": lambda walk, i, xs: walk._flow.branch(walk.emit, i, xs),
    "convert": _Translator._converted,
    "custom-call": _Translator._custom,
    "dynamic-slice": lambda walk, i, xs: indexing.dynamic_slice(
        walk.emit, xs[0], xs[1:], i.dynamic_slice_sizes
    ),
    "dynamic-update-slice": lambda walk, i, xs: indexing.dynamic_update_slice(
        walk.emit, xs[0], xs[1], xs[2:]
    ),
    "opt-barrier": lambda walk, i, xs: xs[0],
    "reduce": _Translator._reduce,
    "reduce-scatter": _Translator._reduce_scatter,
    "reduce-window": _Translator._windows,
    "scatter": _Translator._scatter,
    "topk": lambda walk, i, xs: sorting.top_k(walk.emit, i, xs[0]),
    "sort": _Translator._sort,
    "while": lambda walk, i, xs: walk._flow.loop(i, xs[0]),
}
