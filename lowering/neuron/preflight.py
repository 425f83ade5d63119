"""What neuronx-cc would refuse in a module, told before hours of compiling, in its own codes.

Every rule is a function of one instruction; `module_findings` are those of a module as a whole.
Source: AWS Neuron documentation, error codes, SDK 2.32, and known issues of JAX on Neuron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from lowering.errors import LoweringError
from lowering.neuron.instructions import estimate
from lowering.neuron.proto import TYPE_NAMES, TYPES, Message, read_module
from lowering.target import Target

INSTRUCTIONS = 5_000_000  # that a NEFF may have by default
COMMUNICATORS = 16  # groups of ranks in a NEFF
LARGEST_MODULE = 2**31 - 1  # bytes that a protocol buffer may have
_LARGEST_ID = 2**31 - 1
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")
_UNSUPPORTED = {
    "triangular-solve": "solve by products with an inverse that is computed outside",
    "cholesky": "factorise outside of the step",
    "fft": "write it as a product with the matrix of the transform",
    "conditional": "compute both and select between them",
    "infeed": "give the step its data as inputs",
    "outfeed": "return the values as outputs",
    "send": "take callbacks to the host out of the step",
    "recv": "take callbacks to the host out of the step",
    "reduce-precision": "convert to the smaller type and back",
    "rng": "draw by rng-bit-generator, as jax_default_prng_impl=rbg does",
}
# Calls that the compiler knows (NCC_EHCA005 lists them).
_KNOWN_CALLS = frozenset(
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
    ]
)
_NO_TYPES = ("f64", "s4", "u4", "opaque", "f8e4m3b11fnuz")
_INTEGERS = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64", "pred")


@dataclass(frozen=True)
class Finding:
    """One instruction that the compiler would refuse, or would not take as it stands."""

    code: str  # as in "EVRF004", after NCC_
    instruction: int  # its id, which leads to a line of the model's code; 0 for the module
    what: str
    remedy: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"[NCC_{self.code}] {self.what}; {self.remedy}"


class Module:
    """A module and where to find its parts."""

    def __init__(self, proto: Message, target: Target) -> None:
        self.proto = proto
        self.machine = str(target.about["neuron"]["target"])
        self.memory = target.memory_bytes
        self.computations = {each.id: each for each in proto.computations}
        self.instructions = {
            each.id: each for computation in proto.computations for each in computation.instructions
        }

    def operand(self, instruction: Message, index: int) -> Message:
        return self.instructions[instruction.operand_ids[index]]

    def called(self, instruction: Message) -> list[Message]:
        return [self.computations[number] for number in instruction.called_computation_ids]


Rule = Callable[[Message, Module], Iterator[Finding]]


def check(hlo: bytes, sources: Mapping[int, str], graph: str, target: Target) -> None:
    """Refuse a normalised module that the compiler would refuse, with the lines it comes from.

    Raises:
        LoweringError: with every distinct error.
    """
    errors = [one for one in preflight(hlo, target) if one.severity == "error"]
    if errors:
        raise LoweringError(f"neuronx-cc would refuse {graph}: " + "; ".join(told(errors, sources)))


def preflight(hlo: bytes, target: Target) -> list[Finding]:
    """Everything that the compiler would refuse or change in a normalised module."""
    module = Module(read_module(hlo), target)
    found = [
        finding
        for each in module.instructions.values()
        for rule in RULES
        for finding in rule(each, module)
    ]
    return [*found, *module_findings(module, len(hlo))]


def told(findings: Iterable[Finding], sources: Mapping[int, str]) -> list[str]:
    """Findings with the lines of the model that they come from, each once."""
    lines = (
        f"{finding} (from {sources[finding.instruction]})"
        if finding.instruction in sources
        else str(finding)
        for finding in findings
    )
    return list(dict.fromkeys(lines))


def module_findings(module: Module, size: int) -> Iterator[Finding]:
    """What no single instruction shows."""
    if size > LARGEST_MODULE:
        yield Finding(
            "EXTP004", 0, f"the module has {size:,} bytes, and 2 GiB is the most", "scan the layers"
        )
    count = estimate(module.proto)
    if count > INSTRUCTIONS:
        yield Finding(
            "EVRF007",
            0,
            f"about {count:,} instructions (an estimate), and {INSTRUCTIONS:,} is the limit",
            "split the arrays over more devices, or take fewer tokens in a microbatch",
            "warning",
        )
    groups = {
        tuple(tuple(group.replica_ids) for group in each.replica_groups)
        for each in module.instructions.values()
        if each.replica_groups
    }
    if len(groups) > COMMUNICATORS:
        yield Finding(
            "EVRF015",
            0,
            f"{len(groups)} different groups of ranks, and {COMMUNICATORS} is the most",
            "use fewer mesh axes",
        )
    inputs = sum(_bytes(shape) for shape in module.proto.host_program_shape.parameters)
    if inputs > module.memory:
        yield Finding(
            "EOOM001",
            0,
            f"the inputs alone take {inputs / 1e9:.1f} GB of {module.memory / 1e9:.1f} GB",
            "split the state over more devices",
        )


def _identifier(each: Message, module: Module) -> Iterator[Finding]:
    if each.id > _LARGEST_ID:
        what = f"the id of {each.name} is beyond 32 bits"
        yield Finding("EVRF001", each.id, what, "give the compiler a normalised module")


def _dynamic(each: Message, module: Module) -> Iterator[Finding]:
    if any(each.shape.is_dynamic_dimension):
        what = f"{each.name} has a dynamic size"
        yield Finding("EMOD025", each.id, what, "give every array a fixed size")


def _custom_call(each: Message, module: Module) -> Iterator[Finding]:
    if each.opcode == "custom-call" and each.custom_call_target not in _KNOWN_CALLS:
        what = f"{each.name} calls {each.custom_call_target!r}, which the compiler does not know"
        yield Finding("EHCA005", each.id, what, "write it with ordinary operations")


def _unsupported(each: Message, module: Module) -> Iterator[Finding]:
    if each.opcode in _UNSUPPORTED:
        what = f"{each.name}: {each.opcode} is not supported"
        yield Finding("EVRF001", each.id, what, _UNSUPPORTED[each.opcode])


def _types(each: Message, module: Module) -> Iterator[Finding]:
    name = _type(each)
    if name in ("c64", "c128"):
        what = f"{each.name} is complex"
        yield Finding("EVRF004", each.id, what, "compute with pairs of real numbers")
    elif name in ("f8e4m3fnuz", "f8e5m2fnuz"):
        yield Finding("EVRF005", each.id, f"{each.name} is {name}", "use f8e4m3 or f8e5m2")
    elif name == "f8e4m3fn" and module.machine != "trn3":
        what = f"{each.name} is {name}, which only trn3 has"
        yield Finding("EVRF051", each.id, what, "use f8e4m3")
    elif name in _NO_TYPES:
        what = f"{each.name} is {name}, which the devices do not have"
        yield Finding("ESPP004", each.id, what, "use float32 or bfloat16")


def _constants(each: Message, module: Module) -> Iterator[Finding]:
    if each.opcode == "constant" and any(number >= 2**32 for number in each.literal.u64s):
        what = f"{each.name} is a 64-bit constant beyond 32 bits"
        yield Finding("ESFH002", each.id, what, "compute with 32-bit numbers")


def _integer_arithmetic(each: Message, module: Module) -> Iterator[Finding]:
    """The flags let the compiler compute these in fewer bits, which may not be what was meant."""
    name, wide = _type(each), ("s32", "u32", "s64", "u64")
    codes = {"dot": ("EVRF035", wide), "all-reduce": ("EVRF061", wide)}
    codes |= {"reduce-scatter": ("EVRF063", wide), "power": ("EVRF062", ("s64", "u64"))}
    code, types = codes.get(each.opcode, ("", ()))
    if name in types:
        what = f"{each.name} is a {each.opcode} of {name}, computed in fewer bits"
        yield Finding(code, each.id, what, "convert to float32 if its numbers fit", "warning")


def _top_k(each: Message, module: Module) -> Iterator[Finding]:
    if each.opcode == "topk" and _type(module.operand(each, 0)) in _INTEGERS:
        yield Finding(
            "EVRF013", each.id, f"{each.name} is a top-k of integers", "convert to float32"
        )


def _scatter(each: Message, module: Module) -> Iterator[Finding]:
    if each.opcode != "scatter" or _type(module.operand(each, 0)) not in _INTEGERS:
        return
    (combiner,) = module.called(each)
    if module.instructions[combiner.root_id].opcode != "parameter":  # more than replacing
        what = f"{each.name} combines integers in a scatter"
        yield Finding(
            "EVRF016", each.id, what, "scatter float32, or write it with one-hot products"
        )


def _sort(each: Message, module: Module) -> Iterator[Finding]:
    if each.opcode != "sort":
        return
    (comparator,) = module.called(each)
    root = module.instructions[comparator.root_id]
    if root.opcode != "compare" or root.comparison_direction not in ("LT", "LE", "GT", "GE"):
        what = f"{each.name} sorts by something other than <, <=, > or >="
        yield Finding("EVRF001", each.id, what, "sort by one key that is not NaN")


def _reduce(each: Message, module: Module) -> Iterator[Finding]:
    if each.opcode == "reduce" and len(each.operand_ids) > 2:
        what = f"{each.name} reduces several arrays at once"
        yield Finding(
            "EVRF001", each.id, what, "reduce one array; take the maximum, then its index"
        )


def _windows(each: Message, module: Module) -> Iterator[Finding]:
    for dimension in each.window.dimensions:
        dilated = max(dimension.window_dilation, dimension.base_dilation) > 1
        if each.opcode == "reduce-window" and dilated:
            what = f"{each.name} is a dilated reduce-window"
            yield Finding("EVRF010", each.id, what, "take strided slices instead")
            return


def _shift(each: Message, module: Module) -> Iterator[Finding]:
    if each.opcode == "shift-right-arithmetic" and _type(each) not in ("s32", "u32"):
        what = f"{each.name} shifts {_type(each)}"
        yield Finding("EVRF022", each.id, what, "convert to int32 before")


def _groups(each: Message, module: Module) -> Iterator[Finding]:
    explicit = each.replica_groups or each.source_target_pairs
    if each.opcode in _COLLECTIVES and not explicit:
        what = f"{each.name} names no replica groups"
        yield Finding("EVRF001", each.id, what, "give the compiler a normalised module")


def _loop(each: Message, module: Module) -> Iterator[Finding]:
    """A loop whose condition is not a count against a constant runs as often as data says."""
    if each.opcode != "while":
        return
    _, condition_id = each.called_computation_ids
    root = module.instructions[module.computations[condition_id].root_id]
    limits = [
        module.instructions[number].opcode
        for number in (root.operand_ids if root.opcode == "compare" else ())
    ]
    if "constant" not in limits:
        what = f"{each.name} runs as often as its data says"
        yield Finding("EUOC002", each.id, what, "loop a fixed number of times")


RULES: tuple[Rule, ...] = (
    _identifier,
    _dynamic,
    _custom_call,
    _unsupported,
    _types,
    _constants,
    _integer_arithmetic,
    _top_k,
    _scatter,
    _sort,
    _reduce,
    _windows,
    _shift,
    _groups,
    _loop,
)


def _type(each: Message) -> str:
    return TYPE_NAMES.get(each.shape.element_type, "")


def _bytes(shape: Message) -> int:
    from lowering.neuron.proto import array_bytes

    if shape.element_type == TYPES["tuple"]:
        return sum(map(_bytes, shape.tuple_shapes))
    return array_bytes(shape)
