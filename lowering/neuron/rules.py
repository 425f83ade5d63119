"""Preflight rules for single instructions that neuronx-cc rejects, one function for each rule.

Source: AWS Neuron documentation, SDK 2.32: compiler error codes, and known issues of JAX on Neuron.
A problem that only the known issues list gets the code of unsupported operators. Two kinds of rules
are left to the compiler: those for calls that only Neuron's own libraries make (EVRF036 to 058,
059, 065), and those for illegal shapes (EVRF064), which XLA never produces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lowering.hlo.proto import Message
from lowering.neuron.findings import PreflightFinding, PreflightModule, type_of

Rule = Callable[[Message, PreflightModule], Iterator[PreflightFinding]]

_MAX_ID = 2**31 - 1
_RNG_DEFAULT = 0
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")
_UNSUPPORTED = {
    "triangular-solve": "compute the inverse outside the step, and multiply by it",
    "cholesky": "factorise outside the step",
    "fft": "write it as a product with the matrix of the transform",
    "conditional": "compute both branches and select between their results",
    "infeed": "pass the data to the step as inputs",
    "outfeed": "return the values as outputs",
    "send": "move host callbacks out of the step",
    "recv": "move host callbacks out of the step",
    "reduce-precision": "convert to the smaller type and back",
    "rng": "use rng-bit-generator, as jax_default_prng_impl=rbg does",
}
# Custom calls that the compiler supports (the message of NCC_EHCA005 lists them).
_SUPPORTED_CALLS = frozenset(
    [
        "AwsNeuronErf",
        "AwsNeuronGelu",
        "AwsNeuronGeluApprxTanh",
        "AwsNeuronGeluBackward",
        "AwsNeuronSilu",
        "AwsNeuronSiluBackward",
        "AwsNeuronRmsNorm",
        "AwsNeuronSoftmax",
        "AwsNeuronSoftmaxBackward",
        "AwsNeuronCollectiveMatmul",
        "AwsNeuronIntMatmult",
        "AwsNeuronArgMax",
        "AwsNeuronArgMin",
        "AwsNeuronTopK",
        "AwsNeuronDropoutMaskV1",
        "AwsNeuronCustomNativeKernel",
        "AwsNeuronCustomOp",
        "AwsNeuronDevicePrint",
        "AwsNeuronLNCShardingConstraint",
        "AwsNeuronTransferWithStaticRing",
        "AwsNeuronModuleMarkerStart-Forward",
        "AwsNeuronModuleMarkerEnd-Forward",
        "AwsNeuronModuleMarkerStart-Backward",
        "AwsNeuronModuleMarkerEnd-Backward",
        "NeuronBoundaryMarker-Start",
        "NeuronBoundaryMarker-End",
        "ResizeBilinear",
        "ResizeNearest",
        "ResizeNearestGrad",
    ]
)
_UNSUPPORTED_TYPES = ("f64", "s4", "u4", "opaque", "f8e3m4")
_OTHER_FP8 = ("f8e4m3fnuz", "f8e4m3b11fnuz", "f8e5m2fnuz")
_INTEGERS = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64", "pred")
_INDEX_PRESERVING = ("reshape", "copy", "convert", "bitcast")


def _identifier(instruction: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if instruction.id > _MAX_ID:
        problem = f"the id of {instruction.name} does not fit 32 bits"
        yield PreflightFinding(
            "EVRF001", instruction.id, problem, "pass a normalised module to the compiler"
        )


def _dynamic(instruction: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if any(instruction.shape.is_dynamic_dimension):
        problem = f"{instruction.name} has a dynamic size"
        yield PreflightFinding("EMOD025", instruction.id, problem, "give every array a fixed size")


def _custom_call(instruction: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if (
        instruction.opcode == "custom-call"
        and instruction.custom_call_target not in _SUPPORTED_CALLS
    ):
        problem = (
            f"{instruction.name} calls {instruction.custom_call_target!r}, which the compiler does "
            "not support"
        )
        yield PreflightFinding(
            "EHCA005", instruction.id, problem, "write it with ordinary operations"
        )


def _unsupported(instruction: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if instruction.opcode in _UNSUPPORTED:
        problem = f"{instruction.name}: {instruction.opcode} is not supported"
        yield PreflightFinding("EVRF001", instruction.id, problem, _UNSUPPORTED[instruction.opcode])


def _types(instruction: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    name = type_of(instruction)
    if name in ("c64", "c128"):
        problem = f"{instruction.name} is complex"
        yield PreflightFinding(
            "EVRF004", instruction.id, problem, "compute with pairs of real numbers"
        )
    elif name in _OTHER_FP8:
        yield PreflightFinding(
            "EVRF005", instruction.id, f"{instruction.name} is {name}", "use f8e4m3 or f8e5m2"
        )
    elif name == "f8e4m3fn" and module.machine != "trn3":
        problem = f"{instruction.name} is {name}, which only trn3 supports"
        yield PreflightFinding("EVRF051", instruction.id, problem, "use f8e4m3")
    elif name in _UNSUPPORTED_TYPES:
        problem = f"{instruction.name} is {name}, which the devices do not support"
        yield PreflightFinding("ESPP004", instruction.id, problem, "use float32 or bfloat16")


def _random_bits(instruction: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if instruction.opcode == "rng-bit-generator" and instruction.rng_algorithm != _RNG_DEFAULT:
        problem = f"{instruction.name} selects a random number algorithm"
        yield PreflightFinding("EVRF006", instruction.id, problem, "use the default algorithm")


def _constants(instruction: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if instruction.opcode == "constant" and any(
        value >= 2**32 for value in instruction.literal.u64s
    ):
        problem = f"{instruction.name} is a 64-bit constant that does not fit 32 bits"
        yield PreflightFinding("ESFH002", instruction.id, problem, "compute with 32-bit numbers")


def _integer_arithmetic(
    instruction: Message, module: PreflightModule
) -> Iterator[PreflightFinding]:
    """Warn about integer operations that the flags let the compiler compute in fewer bits."""
    name, wide = type_of(instruction), ("s32", "u32", "s64", "u64")
    codes = {"dot": ("EVRF035", wide), "all-reduce": ("EVRF061", wide)}
    codes |= {"reduce-scatter": ("EVRF063", wide), "power": ("EVRF062", ("s64", "u64"))}
    code, types = codes.get(instruction.opcode, ("", ()))
    if name in types:
        problem = f"{instruction.name} is a {instruction.opcode} of {name}, computed in fewer bits"
        yield PreflightFinding(
            code, instruction.id, problem, "convert to float32 if its values fit", "warning"
        )


def _top_k(instruction: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if instruction.opcode == "topk" and type_of(module.operand(instruction, 0)) in _INTEGERS:
        yield PreflightFinding(
            "EVRF013",
            instruction.id,
            f"{instruction.name} is a top-k of integers",
            "convert to float32",
        )


def _scatter(instruction: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if instruction.opcode != "scatter" or type_of(module.operand(instruction, 0)) not in _INTEGERS:
        return
    # A scatter whose computation returns a parameter only replaces values.
    if module.root(*module.called(instruction)).opcode != "parameter":
        problem = f"{instruction.name} combines integers in a scatter"
        yield PreflightFinding(
            "EVRF016", instruction.id, problem, "scatter float32, or write it with one-hot products"
        )


def _sort(instruction: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if instruction.opcode != "sort":
        return
    root = module.root(*module.called(instruction))
    if root.opcode != "compare" or root.comparison_direction not in ("LT", "LE", "GT", "GE"):
        problem = f"{instruction.name} sorts by something other than <, <=, > or >="
        yield PreflightFinding("EVRF001", instruction.id, problem, "sort by one key without NaN")


def _reduce(instruction: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if instruction.opcode == "reduce" and len(instruction.operand_ids) > 2:
        problem = f"{instruction.name} reduces several arrays at once"
        yield PreflightFinding(
            "EVRF001",
            instruction.id,
            problem,
            "reduce one array; for argmax, the maximum, then its index",
        )


def _reduced_windows(instruction: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if instruction.opcode != "reduce-window":
        return
    if any(dim.base_dilation > 1 for dim in instruction.window.dimensions):
        problem = f"{instruction.name} dilates its input"
        yield PreflightFinding(
            "EVRF017", instruction.id, problem, "insert padding between the elements first"
        )
    if any(dim.window_dilation > 1 for dim in instruction.window.dimensions):
        problem = f"{instruction.name} has a dilated window"
        yield PreflightFinding("EVRF018", instruction.id, problem, "use strided slices instead")
    if len(instruction.operand_ids) != 2:
        problem = f"{instruction.name} reduces several arrays at once"
        yield PreflightFinding("EVRF019", instruction.id, problem, "reduce one array at a time")


def _convolutions(instruction: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if instruction.opcode != "convolution":
        return
    window_dims = instruction.window.dimensions
    if not any(dim.base_dilation > 1 for dim in window_dims):
        return
    if any(dim.window_dilation > 1 for dim in window_dims):
        problem = f"{instruction.name} dilates both its input and its kernel"
        yield PreflightFinding("EVRF010", instruction.id, problem, "dilate one of them beforehand")
    if any(dim.stride > 1 for dim in window_dims):
        problem = f"{instruction.name} has a stride and dilates its input"
        yield PreflightFinding(
            "EVRF011", instruction.id, problem, "use two operations, one for each"
        )


def _indices(instruction: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    """Find gathers and scatters at indices 0, 1, 2 ... that exceed the size of the array."""
    if instruction.opcode == "gather":
        code, axes = "EVRF056", instruction.gather_dimension_numbers.start_index_map
    elif instruction.opcode == "scatter":
        code, axes = "EVRF031", instruction.scatter_dimension_numbers.scatter_dims_to_operand_dims
    else:
        return
    index = module.operand(instruction, 1)
    while index.opcode in _INDEX_PRESERVING:
        index = module.operand(index, 0)
    if index.opcode != "iota" or len(axes) != 1:
        return
    count = index.shape.dimensions[index.dimensions[0]]
    size = module.operand(instruction, 0).shape.dimensions[axes[0]]
    if count > size:
        problem = f"{instruction.name} accesses rows 0 to {count - 1} of an array with {size} rows"
        yield PreflightFinding(
            code,
            instruction.id,
            problem,
            "use one size for both, for example max_position_embeddings = seq_len",
        )


def _shift(instruction: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if instruction.opcode == "shift-right-arithmetic" and type_of(instruction) not in (
        "s32",
        "u32",
    ):
        problem = f"{instruction.name} shifts {type_of(instruction)}"
        yield PreflightFinding("EVRF022", instruction.id, problem, "convert to int32 first")


def _groups(instruction: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    explicit = instruction.replica_groups or instruction.source_target_pairs
    if instruction.opcode in _COLLECTIVES and not explicit:
        problem = f"{instruction.name} has no explicit replica groups"
        yield PreflightFinding(
            "EVRF001", instruction.id, problem, "pass a normalised module to the compiler"
        )


def _loop(instruction: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    """Find loops whose condition does not compare with a constant: their length depends on data."""
    if instruction.opcode != "while":
        return
    _, condition = module.called(instruction)
    root = module.root(condition)
    operand_opcodes = [
        module.instructions[operand_id].opcode
        for operand_id in (root.operand_ids if root.opcode == "compare" else ())
    ]
    if "constant" not in operand_opcodes:
        problem = f"{instruction.name} has a number of iterations that depends on data"
        yield PreflightFinding(
            "EUOC002", instruction.id, problem, "use a fixed number of iterations"
        )


RULES: tuple[Rule, ...] = (
    _identifier,
    _dynamic,
    _custom_call,
    _unsupported,
    _types,
    _random_bits,
    _constants,
    _integer_arithmetic,
    _top_k,
    _scatter,
    _sort,
    _reduce,
    _reduced_windows,
    _convolutions,
    _indices,
    _shift,
    _groups,
    _loop,
)
