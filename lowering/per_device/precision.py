"""Remove reduce-precision instructions that change nothing: neuronx-cc does not support them.

JAX rounds every value that it saves for the backward pass to its own type, so that XLA does not
store it with more precision.
Source: AWS Neuron documentation, known issues of JAX on Neuron, SDK 2.32.
"""

from lowering.hlo.proto import TYPE_NAMES, Message

# Bits of exponent and mantissa of the types that devices compute in.
_BITS = {"f32": (8, 23), "bf16": (8, 7), "f16": (5, 10), "f8e5m2": (5, 2), "f8e4m3": (4, 3)}


def remove_noop_reduce_precision(module: Message) -> None:
    """Replace values that are rounded to their own type by the values themselves."""
    for computation in module.computations:
        source = {
            instruction.id: instruction.operand_ids[0]
            for instruction in computation.instructions
            if _is_exact(instruction)
        }
        if not source:
            continue
        remaining = [
            instruction for instruction in computation.instructions if instruction.id not in source
        ]
        for instruction in remaining:
            instruction.operand_ids[:] = [
                _unrounded(operand, source) for operand in instruction.operand_ids
            ]
            predecessors = [
                _unrounded(predecessor, source)
                for predecessor in instruction.control_predecessor_ids
            ]
            instruction.control_predecessor_ids[:] = predecessors
        computation.root_id = _unrounded(computation.root_id, source)
        del computation.instructions[:]
        computation.instructions.extend(remaining)


def _is_exact(instruction: Message) -> bool:
    if instruction.opcode != "reduce-precision":
        return False
    bits = _BITS.get(TYPE_NAMES.get(instruction.shape.element_type, ""))
    return (
        bits is not None
        and bits[0] <= instruction.exponent_bits
        and bits[1] <= instruction.mantissa_bits
    )


def _unrounded(identifier: int, source: dict[int, int]) -> int:
    while identifier in source:
        identifier = source[identifier]
    return identifier
