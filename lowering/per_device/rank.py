"""Turn the rank of a device into an input of its program.

One NEFF serves all ranks, so a program must read its rank at run time: XLA's partitioner writes
partition-id for that. Here the rank becomes a scalar input, which the loader sets for each rank,
since no public document states that neuronx-cc supports partition-id; the programs of vLLM and NxD
for Neuron receive their rank in the same way.
"""

from collections.abc import Iterable

from lowering.errors import LoweringError
from lowering.hlo.proto import TYPES, Message, make_message

_RANK_OPCODES = ("partition-id", "replica-id")


def rank_as_input(module: Message, *, force: bool = False) -> bool:
    """Replace the instructions that read the rank by a last parameter; return whether it exists.

    Args:
        module: the module, changed in place.
        force: add the parameter even if no instruction reads the rank.

    Raises:
        LoweringError: the rank is read inside a conditional, or another instruction with
            computations of its own that is neither a loop nor a call.
    """
    rewriter = _Rewriter(module)
    entry = rewriter.computations[module.entry_computation_id]
    if entry.id not in rewriter.rank_readers and not force:
        return False
    rank = rewriter.add_parameter(entry)
    module.host_program_shape.parameters.append(_scalar())
    rewriter.rewrite(entry, rank)
    return True


class _Rewriter:
    """Passes the rank from the entry computation to the computations that read it."""

    def __init__(self, module: Message) -> None:
        self.computations = {computation.id: computation for computation in module.computations}
        self._next = 1 + max(i.id for c in module.computations for i in c.instructions)
        self.rank_readers: set[int] = set()
        for computation in module.computations:  # callees come before their callers
            for instruction in computation.instructions:
                if instruction.opcode in _RANK_OPCODES or self.rank_readers.intersection(
                    instruction.called_computation_ids
                ):
                    self.rank_readers.add(computation.id)

    def add_parameter(self, computation: Message) -> int:
        """Add the rank as the last parameter of a computation; return the instruction's id."""
        count = len(computation.program_shape.parameters)
        computation.program_shape.parameters.append(_scalar())
        parameter = self._new("parameter", _scalar(), parameter_number=count)
        _set(computation, [parameter, *computation.instructions])
        return parameter.id

    def rewrite(self, computation: Message, rank: int) -> None:
        """Replace all reads of the rank in a computation by the value with the id `rank`."""
        rank_ids = {op.id for op in computation.instructions if op.opcode in _RANK_OPCODES}

        def rewritten(op: Message) -> Iterable[Message]:
            if op.opcode in _RANK_OPCODES:
                return []
            operands = [rank if operand in rank_ids else operand for operand in op.operand_ids]
            op.operand_ids[:] = operands
            if not self.rank_readers.intersection(op.called_computation_ids):
                return [op]
            if op.opcode == "while":
                return self._loop(computation, op, rank)
            if op.opcode == "call":
                op.operand_ids.append(rank)
                callee = self.computations[op.called_computation_ids[0]]
                self.rewrite(callee, self.add_parameter(callee))
                return [op]
            raise LoweringError(
                f"a {op.opcode} reads the rank of its device, which this target supports only "
                "at the top level and in loops; move axis_index out of it"
            )

        _set(computation, [new for op in computation.instructions for new in rewritten(op)])
        if computation.root_id in rank_ids:
            computation.root_id = rank

    def _loop(self, computation: Message, loop: Message, rank: int) -> list[Message]:
        """Carry the rank through a loop as the last element of its state."""
        by_id = {instruction.id: instruction for instruction in computation.instructions}
        count = len(loop.shape.tuple_shapes)
        initial_state = self._extended(by_id[loop.operand_ids[0]], rank)
        loop.operand_ids[:] = [initial_state[-1].id]
        loop.shape.tuple_shapes.append(_scalar())
        for called in loop.called_computation_ids:
            callee = self.computations[called]
            callee.program_shape.parameters[0].tuple_shapes.append(_scalar())
            state = next(
                instruction
                for instruction in callee.instructions
                if instruction.opcode == "parameter"
            )
            state.shape.tuple_shapes.append(_scalar())
            if len(callee.program_shape.result.tuple_shapes) == count:
                self._body(callee, state, count)
        return [*initial_state, loop, *self._narrowed(computation, loop, count)]

    def _body(self, body: Message, state: Message, index: int) -> None:
        rank_element = self._new(
            "get-tuple-element", _scalar(), operand_ids=[state.id], tuple_index=index
        )
        other_instructions = [
            instruction for instruction in body.instructions if instruction.id != state.id
        ]
        _set(body, [state, rank_element, *other_instructions])
        self.rewrite(body, rank_element.id)
        root = next(
            instruction for instruction in body.instructions if instruction.id == body.root_id
        )
        extended = self._extended(root, rank_element.id)
        body.instructions.extend(extended)
        body.root_id = extended[-1].id
        body.program_shape.result.tuple_shapes.append(_scalar())

    def _extended(self, value: Message, rank: int) -> list[Message]:
        """Return instructions that append the rank to a tuple; the last is the new tuple."""
        shape = make_message("ShapeProto")
        shape.CopyFrom(value.shape)
        shape.tuple_shapes.append(_scalar())
        if value.opcode == "tuple":
            elements, operands = [], list(value.operand_ids)
        else:
            elements = self._elements(value)
            operands = [element.id for element in elements]
        return [*elements, self._new("tuple", shape, operand_ids=[*operands, rank])]

    def _narrowed(self, computation: Message, loop: Message, count: int) -> list[Message]:
        """Return instructions that restore a loop's original state for users of the full tuple."""
        users = [
            instruction
            for instruction in computation.instructions
            if loop.id in instruction.operand_ids and instruction.opcode != "get-tuple-element"
        ]
        if not users and computation.root_id != loop.id:
            return []
        elements = self._elements(loop)[:count]
        shape = make_message("ShapeProto")
        shape.CopyFrom(loop.shape)
        del shape.tuple_shapes[count:]
        original_state = self._new("tuple", shape, operand_ids=[element.id for element in elements])
        for user in users:
            user.operand_ids[:] = [
                original_state.id if i == loop.id else i for i in user.operand_ids
            ]
        if computation.root_id == loop.id:
            computation.root_id = original_state.id
        return [*elements, original_state]

    def _elements(self, value: Message) -> list[Message]:
        return [
            self._new("get-tuple-element", shape, operand_ids=[value.id], tuple_index=index)
            for index, shape in enumerate(value.shape.tuple_shapes)
        ]

    def _new(self, opcode: str, shape: Message, **fields: object) -> Message:
        self._next += 1
        instruction = make_message(
            "HloInstructionProto", opcode=opcode, id=self._next - 1, **fields
        )
        instruction.shape.CopyFrom(shape)
        return instruction


def _set(computation: Message, instructions: list[Message]) -> None:
    del computation.instructions[:]
    computation.instructions.extend(instructions)


def _scalar() -> Message:
    shape = make_message("ShapeProto", element_type=TYPES["u32"])
    shape.layout.SetInParent()
    return shape
