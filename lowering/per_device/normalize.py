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
            kept = marks(instruction.frontend_attributes.map)
            for field in _OF_INSTRUCTION:
                instruction.ClearField(field)
            if kept:
                instruction.frontend_attributes.map.update(kept)
    rank_input = rank_as_input(module, force=rank_input)
    _drop_unused_tuples(module)
    for field in _OF_MODULE:
        module.ClearField(field)
    numbers = _renumber(module, name)
    inputs, outputs = _name_arrays(module)
    kept = {numbers[old]: line for old, line in sources.items() if old in numbers}
    return NormalizedModule(write_module(module), inputs, outputs, rank_input, kept)


def entry_of(module: Message) -> Message:
    """Return the entry computation of a module."""
    return next(each for each in module.computations if each.id == module.entry_computation_id)


def _sources(module: Message) -> dict[int, str]:
    """Return the line of the model's code for each instruction for which it is known."""
    lines = [model_line(_stack(module, frame + 1)) for frame in range(_frames(module))]
    found = {
        each.id: lines[each.metadata.stack_frame_id - 1]
        for computation in module.computations
        for each in computation.instructions
        if 0 < each.metadata.stack_frame_id <= len(lines)
        and lines[each.metadata.stack_frame_id - 1]
    }
    for computation in module.computations:  # constants have none; use that of their first user
        for each in computation.instructions:
            if each.id in found:
                for operand in each.operand_ids:
                    found.setdefault(operand, found[each.id])
    return found


def _frames(module: Message) -> int:
    return len(module.stack_frame_index.stack_frames)


def _stack(module: Message, frame: int) -> list[tuple[str, int]]:
    """Return files and lines, innermost first; all ids in the stack frame table start at 1."""
    index, found = module.stack_frame_index, []
    while 0 < frame <= _frames(module):
        one = index.stack_frames[frame - 1]
        where = index.file_locations[one.file_location_id - 1]
        found.append((index.file_names[where.file_name_id - 1], where.line))
        frame = one.parent_frame_id
    return found


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
    taken = {next(iter(entry.output_shape_index), 0) for entry in entries}
    for donor in module.buffer_donor.entries:
        wanted = parameters[donor.parameter_number].SerializeToString(deterministic=True)
        for index, shape in enumerate(outputs):
            if index not in taken and shape.SerializeToString(deterministic=True) == wanted:
                taken.add(index)
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
        used = {i for each in computation.instructions for i in each.operand_ids}
        used.add(computation.root_id)
        kept = [e for e in computation.instructions if e.opcode != "tuple" or e.id in used]
        del computation.instructions[:]
        computation.instructions.extend(kept)


def _renumber(module: Message, name: str) -> dict[int, int]:
    """Renumber computations and instructions from 1 in order; return new instruction ids by old."""
    computations = {each.id: new for new, each in enumerate(module.computations, 1)}
    instructions = [each for one in module.computations for each in one.instructions]
    numbers = {each.id: new for new, each in enumerate(instructions, 1)}
    for computation in module.computations:
        computation.root_id = numbers[computation.root_id]
        is_entry = computation.id == module.entry_computation_id
        computation.id = computations[computation.id]
        computation.name = "entry" if is_entry else f"computation.{computation.id}"
        computation.program_shape.ClearField("parameter_names")
    for each in instructions:
        each.id = numbers[each.id]
        each.name = f"{each.opcode}.{each.id}"
        each.operand_ids[:] = [numbers[old] for old in each.operand_ids]
        before = [numbers[old] for old in each.control_predecessor_ids if old in numbers]
        each.control_predecessor_ids[:] = sorted(before)
        each.called_computation_ids[:] = [computations[old] for old in each.called_computation_ids]
    module.entry_computation_id = computations[module.entry_computation_id]
    module.entry_computation_name = "entry"
    module.name, module.id = name, 0
    return numbers


def _name_arrays(module: Message) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name inputs and outputs for the NEFF, whose loader finds tensors by name."""
    entry = entry_of(module)
    inputs = tuple(f"input{index}" for index in range(len(entry.program_shape.parameters)))
    outputs = tuple(f"output{index}" for index in range(len(_results(module))))
    for each in entry.instructions:
        if each.opcode == "parameter":
            each.frontend_attributes.map["neff_input_names"] = inputs[each.parameter_number]
        if each.id == entry.root_id:
            each.frontend_attributes.map["neff_output_names"] = ",".join(outputs)
    entry.program_shape.parameter_names[:] = inputs
    module.host_program_shape.parameter_names[:] = inputs
    return inputs, outputs


def _results(module: Message) -> Sequence[Message]:
    """Return the shapes of the outputs; the result of a single output is not a tuple."""
    result = module.host_program_shape.result
    return result.tuple_shapes if result.element_type == TYPES["tuple"] else [result]


def _check_unknown_fields(module: Message) -> None:
    found = sorted({f"field {number} of {where}" for where, number in unknown_fields_of(module)})
    if found:
        raise LoweringError(
            f"XLA wrote {', '.join(found)} into the program, which neuronx-cc would silently "
            "ignore; this jaxlib is newer than the tested ones, install version 0.10 or 0.11"
        )
