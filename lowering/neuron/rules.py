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


def _identifier(each: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if each.id > _MAX_ID:
        what = f"the id of {each.name} does not fit 32 bits"
        yield PreflightFinding("EVRF001", each.id, what, "pass a normalised module to the compiler")


def _dynamic(each: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if any(each.shape.is_dynamic_dimension):
        what = f"{each.name} has a dynamic size"
        yield PreflightFinding("EMOD025", each.id, what, "give every array a fixed size")


def _custom_call(each: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if each.opcode == "custom-call" and each.custom_call_target not in _SUPPORTED_CALLS:
        what = f"{each.name} calls {each.custom_call_target!r}, which the compiler does not support"
        yield PreflightFinding("EHCA005", each.id, what, "write it with ordinary operations")


def _unsupported(each: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if each.opcode in _UNSUPPORTED:
        what = f"{each.name}: {each.opcode} is not supported"
        yield PreflightFinding("EVRF001", each.id, what, _UNSUPPORTED[each.opcode])


def _types(each: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    name = type_of(each)
    if name in ("c64", "c128"):
        what = f"{each.name} is complex"
        yield PreflightFinding("EVRF004", each.id, what, "compute with pairs of real numbers")
    elif name in _OTHER_FP8:
        yield PreflightFinding("EVRF005", each.id, f"{each.name} is {name}", "use f8e4m3 or f8e5m2")
    elif name == "f8e4m3fn" and module.machine != "trn3":
        what = f"{each.name} is {name}, which only trn3 supports"
        yield PreflightFinding("EVRF051", each.id, what, "use f8e4m3")
    elif name in _UNSUPPORTED_TYPES:
        what = f"{each.name} is {name}, which the devices do not support"
        yield PreflightFinding("ESPP004", each.id, what, "use float32 or bfloat16")


def _random_bits(each: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if each.opcode == "rng-bit-generator" and each.rng_algorithm != _RNG_DEFAULT:
        what = f"{each.name} selects a random number algorithm"
        yield PreflightFinding("EVRF006", each.id, what, "use the default algorithm")


def _constants(each: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if each.opcode == "constant" and any(number >= 2**32 for number in each.literal.u64s):
        what = f"{each.name} is a 64-bit constant that does not fit 32 bits"
        yield PreflightFinding("ESFH002", each.id, what, "compute with 32-bit numbers")


def _integer_arithmetic(each: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    """Warn about integer operations that the flags let the compiler compute in fewer bits."""
    name, wide = type_of(each), ("s32", "u32", "s64", "u64")
    codes = {"dot": ("EVRF035", wide), "all-reduce": ("EVRF061", wide)}
    codes |= {"reduce-scatter": ("EVRF063", wide), "power": ("EVRF062", ("s64", "u64"))}
    code, types = codes.get(each.opcode, ("", ()))
    if name in types:
        what = f"{each.name} is a {each.opcode} of {name}, computed in fewer bits"
        yield PreflightFinding(
            code, each.id, what, "convert to float32 if its values fit", "warning"
        )


def _top_k(each: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if each.opcode == "topk" and type_of(module.operand(each, 0)) in _INTEGERS:
        yield PreflightFinding(
            "EVRF013", each.id, f"{each.name} is a top-k of integers", "convert to float32"
        )


def _scatter(each: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if each.opcode != "scatter" or type_of(module.operand(each, 0)) not in _INTEGERS:
        return
    if module.root(*module.called(each)).opcode != "parameter":  # it does not just replace values
        what = f"{each.name} combines integers in a scatter"
        yield PreflightFinding(
            "EVRF016", each.id, what, "scatter float32, or write it with one-hot products"
        )


def _sort(each: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if each.opcode != "sort":
        return
    root = module.root(*module.called(each))
    if root.opcode != "compare" or root.comparison_direction not in ("LT", "LE", "GT", "GE"):
        what = f"{each.name} sorts by something other than <, <=, > or >="
        yield PreflightFinding("EVRF001", each.id, what, "sort by one key without NaN")


def _reduce(each: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if each.opcode == "reduce" and len(each.operand_ids) > 2:
        what = f"{each.name} reduces several arrays at once"
        yield PreflightFinding(
            "EVRF001", each.id, what, "reduce one array; for argmax, the maximum, then its index"
        )


def _reduced_windows(each: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if each.opcode != "reduce-window":
        return
    if any(one.base_dilation > 1 for one in each.window.dimensions):
        what = f"{each.name} dilates its input"
        yield PreflightFinding(
            "EVRF017", each.id, what, "insert padding between the elements first"
        )
    if any(one.window_dilation > 1 for one in each.window.dimensions):
        what = f"{each.name} has a dilated window"
        yield PreflightFinding("EVRF018", each.id, what, "use strided slices instead")
    if len(each.operand_ids) != 2:
        what = f"{each.name} reduces several arrays at once"
        yield PreflightFinding("EVRF019", each.id, what, "reduce one array at a time")


def _convolutions(each: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if each.opcode != "convolution":
        return
    sizes = each.window.dimensions
    if not any(one.base_dilation > 1 for one in sizes):
        return
    if any(one.window_dilation > 1 for one in sizes):
        what = f"{each.name} dilates both its input and its kernel"
        yield PreflightFinding("EVRF010", each.id, what, "dilate one of them beforehand")
    if any(one.stride > 1 for one in sizes):
        what = f"{each.name} has a stride and dilates its input"
        yield PreflightFinding("EVRF011", each.id, what, "use two operations, one for each")


def _indices(each: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    """Find gathers and scatters at indices 0, 1, 2 ... that exceed the size of the array."""
    if each.opcode == "gather":
        code, axes = "EVRF056", each.gather_dimension_numbers.start_index_map
    elif each.opcode == "scatter":
        code, axes = "EVRF031", each.scatter_dimension_numbers.scatter_dims_to_operand_dims
    else:
        return
    index = module.operand(each, 1)
    while index.opcode in _INDEX_PRESERVING:
        index = module.operand(index, 0)
    if index.opcode != "iota" or len(axes) != 1:
        return
    count = index.shape.dimensions[index.dimensions[0]]
    size = module.operand(each, 0).shape.dimensions[axes[0]]
    if count > size:
        what = f"{each.name} accesses rows 0 to {count - 1} of an array with {size} rows"
        yield PreflightFinding(
            code,
            each.id,
            what,
            "use one size for both, for example max_position_embeddings = seq_len",
        )


def _shift(each: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    if each.opcode == "shift-right-arithmetic" and type_of(each) not in ("s32", "u32"):
        what = f"{each.name} shifts {type_of(each)}"
        yield PreflightFinding("EVRF022", each.id, what, "convert to int32 first")


def _groups(each: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    explicit = each.replica_groups or each.source_target_pairs
    if each.opcode in _COLLECTIVES and not explicit:
        what = f"{each.name} has no explicit replica groups"
        yield PreflightFinding("EVRF001", each.id, what, "pass a normalised module to the compiler")


def _loop(each: Message, module: PreflightModule) -> Iterator[PreflightFinding]:
    """Find loops whose condition does not compare with a constant: their length depends on data."""
    if each.opcode != "while":
        return
    _, condition = module.called(each)
    root = module.root(condition)
    limits = [
        module.instructions[number].opcode
        for number in (root.operand_ids if root.opcode == "compare" else ())
    ]
    if "constant" not in limits:
        what = f"{each.name} has a number of iterations that depends on data"
        yield PreflightFinding("EUOC002", each.id, what, "use a fixed number of iterations")


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
