"""Normalise one device's HLO to the form that neuronx-cc reads, byte-identical in every process.

XLA (jaxlib 0.10, 0.11) writes newer forms than Neuron's tools read: ids beyond 32 bits crash them,
and they silently ignore newer forms of replica groups and donations. Names, source lines and
shardings have no meaning for them, and would make equal programs differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lowering.errors import LoweringError
from lowering.hlo.proto import TYPES, Message, read_module, unknown_fields_of, write_module
from lowering.per_device.explicit_groups import write_explicit_groups
from lowering.per_device.precision import remove_noop_reduce_precision
from lowering.per_device.rank import rank_as_input
from lowering.tracing.region_marks import marks
from lowering.tracing.source_lines import model_line

_OF_MODULE = (
    "schedule",
    "device_assignment",
    "stack_frame_index",
    "spmd_output_sharding",
    "spmd_parameters_shardings",
    "buffer_donor",
    "frontend_attributes",
)
_OF_INSTRUCTION = (
    "metadata",
    "sharding",
    "statistics_viz",
    "original_value",
    "frontend_attributes",
    "parameter_replication",
    "conv_kind",
    "sparsity_config",
    "block_scaling_config",
)
_MAY_ALIAS = 1


@dataclass(frozen=True)
class NormalizedModule:
    """A normalised module, with its inputs, outputs and source lines."""

    hlo: bytes  # an HloModuleProto
    inputs: tuple[str, ...]  # of the NEFF, in order; the rank is last if rank_input is true
    outputs: tuple[str, ...]
    rank_input: bool
    sources: dict[int, str]  # instruction id to line of the model's code


def normalize_module(
    binary: bytes, *, name: str, ranks: int, rank_input: bool = False
) -> NormalizedModule:
    """Normalise the module of one device, as lowering.xla.spmd_module.partition returns it.

    Args:
        binary: the module, an HloModuleProto.
        name: new name of the module; XLA names it after a Python function.
        ranks: number of devices that run the module.
        rank_input: add the rank as an input even if the module does not use it.

    Raises:
        LoweringError: the module has fields that Neuron's tools would ignore, or reads the rank
            where that is not supported.
    """
    module = read_module(binary)
    _check_unknown_fields(module)
    sources = _sources(module)
    _alias_donated_inputs(module)
    remove_noop_reduce_precision(module)
    for computation in module.computations:
        for instruction in computation.instructions:
            write_explicit_groups(instruction, ranks)
            _store_comparison_type(instruction)
            region_marks = marks(instruction.frontend_attributes.map)
            for field in _OF_INSTRUCTION:
                instruction.ClearField(field)
            if region_marks:
                instruction.frontend_attributes.map.update(region_marks)
    rank_input = rank_as_input(module, force=rank_input)
    _drop_unused_tuples(module)
    for field in _OF_MODULE:
        module.ClearField(field)
    instruction_ids = _renumber(module, name)
    inputs, outputs = _name_arrays(module)
    source_lines = {
        instruction_ids[old_id]: line
        for old_id, line in sources.items()
        if old_id in instruction_ids
    }
    return NormalizedModule(write_module(module), inputs, outputs, rank_input, source_lines)


def entry_of(module: Message) -> Message:
    """Return the entry computation of a module."""
    return next(
        computation
        for computation in module.computations
        if computation.id == module.entry_computation_id
    )


def _sources(module: Message) -> dict[int, str]:
    """Return the line of the model's code for each instruction for which it is known."""
    lines = [model_line(_stack(module, frame + 1)) for frame in range(_frames(module))]
    line_by_id = {
        instruction.id: lines[instruction.metadata.stack_frame_id - 1]
        for computation in module.computations
        for instruction in computation.instructions
        if 0 < instruction.metadata.stack_frame_id <= len(lines)
        and lines[instruction.metadata.stack_frame_id - 1]
    }
    for computation in module.computations:  # constants have none; use that of their first user
        for instruction in computation.instructions:
            if instruction.id in line_by_id:
                for operand in instruction.operand_ids:
                    line_by_id.setdefault(operand, line_by_id[instruction.id])
    return line_by_id


def _frames(module: Message) -> int:
    return len(module.stack_frame_index.stack_frames)


def _stack(module: Message, frame: int) -> list[tuple[str, int]]:
    """Return files and lines, innermost first; all ids in the stack frame table start at 1."""
    index, stack = module.stack_frame_index, []
    while 0 < frame <= _frames(module):
        frame_record = index.stack_frames[frame - 1]
        location = index.file_locations[frame_record.file_location_id - 1]
        stack.append((index.file_names[location.file_name_id - 1], location.line))
        frame = frame_record.parent_frame_id
    return stack


def _store_comparison_type(comparison: Message) -> None:
    """Store a comparison's order in the older type field; jaxlib 0.11 has a separate field."""
    if comparison.comparison_type == "FLOAT" and comparison.comparison_order == "TOTAL":
        comparison.comparison_type = "TOTALORDER"
    comparison.ClearField("comparison_order")


def _alias_donated_inputs(module: Message) -> None:
    """Alias each donated input with an output, as XLA would when it compiles.

    That is the first output of the same shape that is not aliased yet. Arrays of a state are
    outputs in the same order as inputs, so each is aliased with its own new value.
    """
    entries = module.input_output_alias.entries
    parameters = module.host_program_shape.parameters
    outputs = _results(module)  # never a tuple of one output
    aliased_outputs = {next(iter(entry.output_shape_index), 0) for entry in entries}
    for donor in module.buffer_donor.entries:
        donor_shape = parameters[donor.parameter_number].SerializeToString(deterministic=True)
        for index, shape in enumerate(outputs):
            if (
                index not in aliased_outputs
                and shape.SerializeToString(deterministic=True) == donor_shape
            ):
                aliased_outputs.add(index)
                entries.add(
                    output_shape_index=[index] if len(outputs) > 1 else [],
                    parameter_number=donor.parameter_number,
                    kind=_MAY_ALIAS,
                )
                break
    ordered = sorted(entries, key=lambda entry: tuple(entry.output_shape_index))
    del entries[:]
    entries.extend(ordered)


def _drop_unused_tuples(module: Message) -> None:
    """Remove tuples that are no longer used after `rank_as_input`."""
    for computation in module.computations:
        used_ids = {i for instruction in computation.instructions for i in instruction.operand_ids}
        used_ids.add(computation.root_id)
        remaining = [e for e in computation.instructions if e.opcode != "tuple" or e.id in used_ids]
        del computation.instructions[:]
        computation.instructions.extend(remaining)


def _renumber(module: Message, name: str) -> dict[int, int]:
    """Renumber computations and instructions from 1 in order; return new instruction ids by old."""
    computation_ids = {
        computation.id: new for new, computation in enumerate(module.computations, 1)
    }
    instructions = [
        instruction
        for computation in module.computations
        for instruction in computation.instructions
    ]
    instruction_ids = {instruction.id: new for new, instruction in enumerate(instructions, 1)}
    for computation in module.computations:
        computation.root_id = instruction_ids[computation.root_id]
        is_entry = computation.id == module.entry_computation_id
        computation.id = computation_ids[computation.id]
        computation.name = "entry" if is_entry else f"computation.{computation.id}"
        computation.program_shape.ClearField("parameter_names")
    for instruction in instructions:
        instruction.id = instruction_ids[instruction.id]
        instruction.name = f"{instruction.opcode}.{instruction.id}"
        instruction.operand_ids[:] = [instruction_ids[old_id] for old_id in instruction.operand_ids]
        predecessors = [
            instruction_ids[old_id]
            for old_id in instruction.control_predecessor_ids
            if old_id in instruction_ids
        ]
        instruction.control_predecessor_ids[:] = sorted(predecessors)
        instruction.called_computation_ids[:] = [
            computation_ids[old_id] for old_id in instruction.called_computation_ids
        ]
    module.entry_computation_id = computation_ids[module.entry_computation_id]
    module.entry_computation_name = "entry"
    module.name, module.id = name, 0
    return instruction_ids


def _name_arrays(module: Message) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name inputs and outputs for the NEFF, whose loader finds tensors by name."""
    entry = entry_of(module)
    inputs = tuple(f"input{index}" for index in range(len(entry.program_shape.parameters)))
    outputs = tuple(f"output{index}" for index in range(len(_results(module))))
    for instruction in entry.instructions:
        if instruction.opcode == "parameter":
            instruction.frontend_attributes.map["neff_input_names"] = inputs[
                instruction.parameter_number
            ]
        if instruction.id == entry.root_id:
            instruction.frontend_attributes.map["neff_output_names"] = ",".join(outputs)
    entry.program_shape.parameter_names[:] = inputs
    module.host_program_shape.parameter_names[:] = inputs
    return inputs, outputs


def _results(module: Message) -> Sequence[Message]:
    """Return the shapes of the outputs; the result of a single output is not a tuple."""
    result = module.host_program_shape.result
    return result.tuple_shapes if result.element_type == TYPES["tuple"] else [result]


def _check_unknown_fields(module: Message) -> None:
    unknown_fields = sorted(
        {f"field {number} of {message_name}" for message_name, number in unknown_fields_of(module)}
    )
    if unknown_fields:
        raise LoweringError(
            f"XLA wrote {', '.join(unknown_fields)} into the program, which neuronx-cc would "
            "silently ignore; this jaxlib is newer than the tested ones, install version 0.10 "
            "or 0.11"
        )
