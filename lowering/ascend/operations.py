"""Translation of HLO's operations on elements and shapes to MindSpore operators.

Edge cases (division by zero, shifts beyond the width, NaN) have the results that HLO defines.
Source: openxla.org/xla/operation_semantics.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowering.ascend.emitter import Emitter, inverse, unsupported
from lowering.ascend.values import ArrayValue, constant_value
from lowering.hlo.proto import TYPE_NAMES, Message

FLOATS = ("f16", "f32", "f64", "bf16")
_BITS = {
    "pred": 1,
    "s8": 8,
    "s16": 16,
    "s32": 32,
    "s64": 64,
    "u8": 8,
    "u16": 16,
    "u32": 32,
    "u64": 64,
}

UNARY: dict[str, tuple[str, Any]] = {
    "abs": ("Abs", np.abs),
    "ceil": ("Ceil", np.ceil),
    "cosine": ("Cos", np.cos),
    "erf": ("Erf", None),
    "exponential": ("Exp", np.exp),
    "exponential-minus-one": ("Expm1", np.expm1),
    "floor": ("Floor", np.floor),
    "log": ("Log", np.log),
    "log-plus-one": ("Log1p", np.log1p),
    "logistic": ("Sigmoid", None),
    "negate": ("Neg", np.negative),
    "round-nearest-even": ("Rint", np.rint),
    "rsqrt": ("Rsqrt", lambda x: 1 / np.sqrt(x)),
    "sign": ("Sign", np.sign),
    "sine": ("Sin", np.sin),
    "sqrt": ("Sqrt", np.sqrt),
    "tan": ("Tan", np.tan),
    "tanh": ("Tanh", np.tanh),
}
BINARY: dict[str, tuple[str, Any]] = {
    "add": ("Add", np.add),
    "atan2": ("Atan2", np.arctan2),
    "maximum": ("Maximum", np.maximum),
    "minimum": ("Minimum", np.minimum),
    "multiply": ("Mul", np.multiply),
    "power": ("Pow", np.power),
    "subtract": ("Sub", np.subtract),
}
_BITWISE: dict[str, tuple[str, Any, str, Any]] = {
    "and": ("BitwiseAnd", np.bitwise_and, "LogicalAnd", np.logical_and),
    "or": ("BitwiseOr", np.bitwise_or, "LogicalOr", np.logical_or),
    "xor": ("BitwiseXor", np.bitwise_xor, "NotEqual", np.not_equal),
}
_COMPARE = {
    "EQ": "Equal", "NE": "NotEqual", "LT": "Less", "LE": "LessEqual", "GT": "Greater",
    "GE": "GreaterEqual",
}  # fmt: skip
REDUCERS: dict[str, tuple[str, Any]] = {
    "add": ("ReduceSum", np.add),
    "and": ("ReduceAll", np.logical_and),
    "maximum": ("ReduceMax", np.maximum),
    "minimum": ("ReduceMin", np.minimum),
    "multiply": ("ReduceProd", np.multiply),
    "or": ("ReduceAny", np.logical_or),
}


def hlo_type(instruction: Message) -> str:
    """Return the HLO name of an instruction's element type."""
    return TYPE_NAMES[instruction.shape.element_type]


def shape_of(instruction: Message) -> tuple[int, ...]:
    """Return the shape of an instruction's result."""
    return tuple(instruction.shape.dimensions)


def wrap_to_hlo_type(emit: Emitter, value: ArrayValue, dtype: str) -> ArrayValue:
    """Wrap or round a result to its HLO type, where the stored type is wider."""
    if dtype == "u32":
        mask = emit.integer(0xFFFFFFFF, value)
        return emit.elementwise("BitwiseAnd", np.bitwise_and, [value, mask])
    if dtype == "bf16" and value.dtype != "bf16":
        return round_to_bf16(emit, value)
    return value


def round_to_bf16(emit: Emitter, value: ArrayValue) -> ArrayValue:
    """Round to bfloat16 precision, in the wider stored type."""
    return emit.cast(emit.cast(value, "bf16"), value.dtype)


def unary(emit: Emitter, instruction: Message, x: ArrayValue) -> ArrayValue:
    """Translate an operation of one operand, one of UNARY."""
    dtype = hlo_type(instruction)
    if instruction.opcode == "negate" and dtype == "pred":
        return x
    if instruction.opcode in ("abs", "sign") and dtype.startswith("u"):
        raise unsupported(f"{instruction.opcode} of {dtype}")
    operator, function = UNARY[instruction.opcode]
    if instruction.opcode == "sign" and dtype in FLOATS:  # HLO's sign of NaN is NaN
        signs = emit.elementwise(operator, function, [x])
        return emit.select(emit.compare("NotEqual", x, x), x, signs)
    return wrap_to_hlo_type(emit, emit.elementwise(operator, function, [x]), dtype)


def binary(emit: Emitter, instruction: Message, a: ArrayValue, b: ArrayValue) -> ArrayValue:
    """Translate an operation of two operands, one of BINARY."""
    dtype, opcode = hlo_type(instruction), instruction.opcode
    if dtype == "pred":  # arithmetic on one bit
        opcode = {"add": "or", "maximum": "or", "multiply": "and", "minimum": "and"}[opcode]
        return logical(emit, opcode, a, b)
    if opcode == "power" and dtype not in FLOATS:
        raise unsupported(f"power of {dtype}")
    if opcode in ("maximum", "minimum"):
        less = compare(emit, "GT" if opcode == "maximum" else "LT", a, b, dtype)
        if dtype in ("u16", "u64"):  # MindSpore has no operator for them
            return emit.select(less, a, b)
        if dtype in FLOATS:  # NaN propagates in HLO; MindSpore's operators drop it
            operator, function = BINARY[opcode]
            return _propagate_nan(emit, emit.elementwise(operator, function, [a, b]), a, b)
    operator, function = BINARY[opcode]
    return wrap_to_hlo_type(emit, emit.elementwise(operator, function, [a, b]), dtype)


def _propagate_nan(emit: Emitter, result: ArrayValue, a: ArrayValue, b: ArrayValue) -> ArrayValue:
    for x in (a, b):
        if x.data is not None and not _has_nan(x.data):
            continue  # a constant bound, as in relu
        result = emit.select(emit.compare("NotEqual", x, x), x, result)
    return result


def _has_nan(data: np.ndarray) -> bool:
    """Return whether a constant contains NaN; repeated elements are checked once."""
    unrepeated = tuple(slice(1) if stride == 0 else slice(None) for stride in data.strides)
    return bool(np.isnan(data[unrepeated].astype(np.float64)).any())


def logical(emit: Emitter, opcode: str, a: ArrayValue, b: ArrayValue) -> ArrayValue:
    """Translate and, or, xor: bitwise on integers, logical on booleans."""
    bits, of_bits, truths, of_truths = _BITWISE[opcode]
    if a.dtype != "pred":
        return emit.elementwise(bits, of_bits, [a, b])
    if truths == "NotEqual":
        return emit.compare(truths, a, b)
    return emit.elementwise(truths, of_truths, [a, b], "pred")


def bitwise_not(emit: Emitter, instruction: Message, x: ArrayValue) -> ArrayValue:
    """Translate not: bitwise on integers, logical on booleans."""
    dtype = hlo_type(instruction)
    if dtype == "pred":
        return emit.elementwise("LogicalNot", np.logical_not, [x], "pred")
    mask = emit.integer(0xFFFFFFFF if dtype == "u32" else -1 if dtype[0] == "s" or dtype == "u64"
                        else (1 << _BITS[dtype]) - 1, x)  # fmt: skip
    return emit.elementwise("BitwiseXor", np.bitwise_xor, [x, mask])


def divide(emit: Emitter, instruction: Message, a: ArrayValue, b: ArrayValue) -> ArrayValue:
    """Translate division and remainder; integers round towards zero.

    An integer divided by zero is -1 (all bits set), with the dividend as remainder.
    """
    dtype, is_remainder = hlo_type(instruction), instruction.opcode == "remainder"
    if dtype in FLOATS:
        if is_remainder:
            return wrap_to_hlo_type(emit, emit.elementwise("TruncateMod", np.fmod, [a, b]), dtype)
        result = emit.elementwise("Div", np.divide, [a, b])
        if not emit.native:  # MindSpore's Div on a CPU returns infinity for NaN / 0
            result = _propagate_nan(emit, result, a, b)
        return wrap_to_hlo_type(emit, result, dtype)
    wide_a, wide_b = emit.cast(a, "s64"), emit.cast(b, "s64")
    is_zero = emit.compare("Equal", wide_b, emit.integer(0, wide_b))
    safe = emit.select(is_zero, emit.integer(1, wide_b), wide_b)
    if dtype == "s64":
        result = _divided_64(emit, wide_a, safe, is_remainder)
    else:
        result = _quotient(emit, wide_a, safe)
        result = _remainder(emit, wide_a, result, safe) if is_remainder else result
    by_zero = wide_a if is_remainder else emit.integer(-1, result)
    result = emit.select(is_zero, by_zero, result)
    return wrap_to_hlo_type(emit, emit.cast(result, a.dtype), dtype)


def _divided_64(emit: Emitter, a: ArrayValue, b: ArrayValue, is_remainder: bool) -> ArrayValue:
    """Divide 64-bit integers; negate for a divisor of -1.

    Dividing -2**63 by -1 overflows 64 bits and would crash the process.
    """
    is_minus = emit.compare("Equal", b, emit.integer(-1, b))
    safe = emit.select(is_minus, emit.integer(1, b), b)
    result, zero = _quotient(emit, a, safe), emit.integer(0, a)
    result = _remainder(emit, a, result, safe) if is_remainder else result
    result_for_minus_one = zero if is_remainder else emit.subtract(zero, a)
    return emit.select(is_minus, emit.broadcast_to(result_for_minus_one, result.shape), result)


def _quotient(emit: Emitter, a: ArrayValue, b: ArrayValue) -> ArrayValue:
    # On a CPU, TruncateDiv is inexact beyond 53 bits, but RealDiv of integers is exact.
    return emit.elementwise("TruncateDiv" if emit.native else "RealDiv", _truncated, [a, b])


def _remainder(emit: Emitter, a: ArrayValue, quotient: ArrayValue, b: ArrayValue) -> ArrayValue:
    return emit.subtract(a, emit.multiply(quotient, b))


def _truncated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


def shift(emit: Emitter, instruction: Message, a: ArrayValue, b: ArrayValue) -> ArrayValue:
    """Translate shifts; a shift by the type's width or more gives 0, or copies of the sign bit."""
    dtype, opcode = hlo_type(instruction), instruction.opcode
    bits, logical_right = _BITS[dtype], opcode == "shift-right-logical"
    wide, by = emit.cast(a, "s64"), emit.cast(b, "s64")
    if logical_right and dtype[0] == "s" and bits < 64:
        mask = emit.integer((1 << bits) - 1, wide)
        wide = emit.elementwise("BitwiseAnd", np.bitwise_and, [wide, mask])
    if opcode == "shift-right-arithmetic" and dtype[0] == "u" and bits < 64:
        wide = to_signed(emit, wide, bits)  # so that the shift copies the highest bit
    within = emit.minimum(by, emit.integer(bits - 1, by))
    if opcode == "shift-left":
        result = emit.elementwise("LeftShift", np.left_shift, [wide, within])
    else:
        result = emit.elementwise("RightShift", np.right_shift, [wide, within])
    if logical_right and bits == 64:
        result = _without_copies(emit, result, within)
    if opcode != "shift-right-arithmetic":
        beyond = emit.compare("GreaterEqual", by, emit.integer(bits, by))
        result = emit.select(beyond, emit.integer(0, result), result)
    return wrap_to_hlo_type(emit, emit.cast(result, a.dtype), dtype)


def _without_copies(emit: Emitter, shifted_: ArrayValue, by: ArrayValue) -> ArrayValue:
    """Clear the copies of the sign bit after a shift by `by`, with the mask 2 ** (64 - by) - 1."""
    one, highest = emit.integer(1, by), emit.integer(63, by)
    exponent = emit.subtract(highest, by)  # 2 ** exponent - 1 + 2 ** exponent never overflows
    power = emit.elementwise(
        "LeftShift", np.left_shift, [emit.broadcast_to(one, exponent.shape), exponent]
    )
    mask = emit.add(emit.subtract(power, one), power)
    return emit.elementwise("BitwiseAnd", np.bitwise_and, [shifted_, mask])


def compare(emit: Emitter, direction: str, a: ArrayValue, b: ArrayValue, dtype: str) -> ArrayValue:
    """Translate a comparison; `dtype` is the HLO type of the operands."""
    if dtype == "u64":  # stored in a signed type: flipping the highest bit gives the same order
        sign_bit = emit.integer(-(1 << 63), a)
        a, b = (emit.elementwise("BitwiseXor", np.bitwise_xor, [x, sign_bit]) for x in (a, b))
    return emit.compare(_COMPARE[direction], a, b)


def convert(emit: Emitter, instruction: Message, x: ArrayValue, source: str) -> ArrayValue:
    """Convert to another type; floats round towards zero and saturate at an integer type's range.

    `source` is the HLO type of x.
    """
    dtype = hlo_type(instruction)
    stored = emit.storage_type(dtype)
    if dtype == "pred":
        return emit.compare("NotEqual", x, emit.literal(np.array(0), source))
    if (source == "u64" and dtype in FLOATS) or (dtype == "u64" and source in FLOATS):
        raise unsupported(f"conversion of {source} to {dtype}")
    if source in FLOATS and dtype not in FLOATS:
        x = _clamp_to_integer_range(
            emit, emit.cast(x, "f64" if dtype not in ("s8", "u8") else "f32"), dtype
        )
        return emit.cast(x, stored)
    if dtype[0] == "u" and _BITS[dtype] < 64 and source not in FLOATS:
        wide = emit.cast(x, "s64")
        mask = emit.integer((1 << _BITS[dtype]) - 1, wide)
        wide = emit.elementwise("BitwiseAnd", np.bitwise_and, [wide, mask])
        return emit.cast(wide, stored)
    return wrap_to_hlo_type(emit, emit.cast(x, stored), dtype)


def _clamp_to_integer_range(emit: Emitter, x: ArrayValue, dtype: str) -> ArrayValue:
    """Clamp floats to the range of an integer type; NaN becomes 0."""
    bits = _BITS[dtype]
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if dtype[0] == "s" else (0, 2**bits - 1)
    if bits == 64:
        high = 2**63 - 1024  # the largest float64 below 2**63
    x = emit.select(emit.compare("NotEqual", x, x), emit.literal(np.array(0.0), x.dtype), x)
    x = emit.maximum(x, emit.literal(np.array(float(low)), x.dtype))
    return emit.minimum(x, emit.literal(np.array(float(high)), x.dtype))


def bitcast(emit: Emitter, instruction: Message, x: ArrayValue, source: str) -> ArrayValue:
    """Reinterpret the bits of x as another type of the same width.

    From integers to f32 by arithmetic, since MindSpore has no operator for it.
    """
    dtype = hlo_type(instruction)
    if _BITS.get(dtype) == _BITS.get(source):
        return _reinterpret_sign(emit, x, dtype)
    if source in ("u32", "s32") and dtype == "f32":
        return _float_of_bits(emit, _reinterpret_sign(emit, x, "u32"))
    raise unsupported(f"bitcast-convert of {source} to {dtype}")


def _reinterpret_sign(emit: Emitter, x: ArrayValue, dtype: str) -> ArrayValue:
    """Reinterpret the bits of an integer as signed or unsigned."""
    wide = emit.cast(x, "s64")
    if dtype == "u32":
        return wrap_to_hlo_type(emit, wide, dtype)
    if dtype == "s32" and x.dtype == "s64":
        wide = to_signed(emit, wide)
    return emit.cast(wide, emit.storage_type(dtype))


def to_signed(emit: Emitter, wide: ArrayValue, bits: int = 32) -> ArrayValue:
    """Interpret unsigned numbers as signed: subtract 2 ** bits from 2 ** (bits - 1) on."""
    half, modulus = emit.integer(1 << (bits - 1), wide), emit.integer(1 << bits, wide)
    return emit.select(emit.compare("GreaterEqual", wide, half), emit.subtract(wide, modulus), wide)


def _float_of_bits(emit: Emitter, bits: ArrayValue) -> ArrayValue:
    """Compute an f32 from its bits: (-1)^sign * 2^(exponent - 127) * 1.fraction.

    Source: IEEE 754.
    """

    def field(shift: int, width: int) -> ArrayValue:
        by, mask = emit.integer(shift, bits), emit.integer((1 << width) - 1, bits)
        moved = emit.elementwise("RightShift", np.right_shift, [bits, by]) if shift else bits
        return emit.elementwise("BitwiseAnd", np.bitwise_and, [moved, mask])

    sign, exponent, fraction = field(31, 1), field(23, 8), field(0, 23)
    zero, one = emit.integer(0, bits), emit.integer(1, bits)
    is_small = emit.compare("Equal", exponent, zero)
    is_special = emit.compare("Equal", exponent, emit.integer(255, bits))
    leading = emit.select(is_small, zero, emit.integer(1 << 23, bits))
    mantissa = emit.cast(emit.add(fraction, leading), "f64")
    power = emit.cast(emit.subtract(emit.maximum(exponent, one), emit.integer(150, bits)), "f64")
    two = constant_value(np.array(2.0), "f64")
    size = emit.multiply(mantissa, emit.elementwise("Pow", np.power, [two, power]))
    infinity, not_a_number = (
        constant_value(np.array(v, np.float64), "f64") for v in (np.inf, np.nan)
    )
    special = emit.select(emit.compare("Equal", fraction, zero), infinity, not_a_number)
    size = emit.select(is_special, special, size)
    is_negative = emit.compare("NotEqual", sign, zero)
    return emit.cast(
        emit.select(is_negative, emit.elementwise("Neg", np.negative, [size]), size), "f32"
    )


def broadcast(emit: Emitter, instruction: Message, x: ArrayValue) -> ArrayValue:
    """Translate HLO's broadcast, which maps each array axis of x to one of the result."""
    shape = [1] * len(instruction.shape.dimensions)
    x = emit.transpose(x, inverse(instruction.dimensions))
    for axis, size in zip(sorted(instruction.dimensions), x.shape, strict=True):
        shape[axis] = size
    return emit.broadcast_to(emit.reshape(x, shape), shape_of(instruction))


def iota(emit: Emitter, instruction: Message) -> ArrayValue:
    """Translate iota: indices along one array axis, repeated along the others."""
    shape, (axis,) = shape_of(instruction), instruction.dimensions
    along = [1] * len(shape)
    along[axis] = shape[axis]
    numbers = np.arange(shape[axis]).reshape(along)
    return emit.broadcast_to(emit.literal(numbers, hlo_type(instruction)), shape)


def pad(emit: Emitter, instruction: Message, x: ArrayValue, filler: ArrayValue) -> ArrayValue:
    """Translate pad, around and between elements; negative widths remove elements."""
    for axis, width in enumerate(instruction.padding_config.dimensions):
        x = _insert_interior_padding(emit, x, filler, axis, width.interior_padding)
        x = _trim(emit, x, axis, max(0, -width.edge_padding_low), max(0, -width.edge_padding_high))

        def block(size: int, axis: int = axis, x: ArrayValue = x) -> ArrayValue:
            shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
            return emit.broadcast_to(emit.reshape(filler, (1,) * len(shape)), shape)

        low, high = max(0, width.edge_padding_low), max(0, width.edge_padding_high)
        if low or high:
            x = emit.concatenate([block(low), x, block(high)], axis)
    return x


def _insert_interior_padding(
    emit: Emitter, x: ArrayValue, filler: ArrayValue, axis: int, between: int
) -> ArrayValue:
    """Insert fillers between elements, along a new axis after this one, which is then flattened."""
    if not between or x.shape[axis] < 2:
        return x
    expanded = emit.reshape(x, (*x.shape[: axis + 1], 1, *x.shape[axis + 1 :]))
    shape = list(expanded.shape)
    shape[axis + 1] = between
    fillers = emit.broadcast_to(emit.reshape(filler, (1,) * len(shape)), shape)
    interleaved = emit.concatenate([expanded, fillers], axis + 1)
    flat = emit.reshape(
        interleaved, (*x.shape[:axis], x.shape[axis] * (between + 1), *x.shape[axis + 1 :])
    )
    return _trim(emit, flat, axis, 0, between)


def _trim(emit: Emitter, x: ArrayValue, axis: int, low: int, high: int) -> ArrayValue:
    if not (low or high):
        return x
    starts, limits = [0] * len(x.shape), list(x.shape)
    starts[axis], limits[axis] = low, x.shape[axis] - high
    return emit.slice(x, starts, limits)


def dot(emit: Emitter, instruction: Message, a: ArrayValue, b: ArrayValue) -> ArrayValue:
    """Translate dot to MatMul, or to BatchMatMul if it has batch axes."""
    numbers = instruction.dot_dimension_numbers
    batch_a, batch_b = list(numbers.lhs_batch_dimensions), list(numbers.rhs_batch_dimensions)
    over_a = list(numbers.lhs_contracting_dimensions)
    over_b = list(numbers.rhs_contracting_dimensions)
    free_a = [axis for axis in range(len(a.shape)) if axis not in batch_a + over_a]
    free_b = [axis for axis in range(len(b.shape)) if axis not in batch_b + over_b]

    def sizes(value: ArrayValue, axes: list[int]) -> int:
        return int(np.prod([value.shape[axis] for axis in axes], dtype=np.int64))

    rows, inner, columns = sizes(a, free_a), sizes(a, over_a), sizes(b, free_b)
    many = (sizes(a, batch_a),) if batch_a else ()
    lhs = emit.reshape(emit.transpose(a, batch_a + free_a + over_a), (*many, rows, inner))
    rhs = emit.reshape(emit.transpose(b, batch_b + over_b + free_b), (*many, inner, columns))
    dtype = hlo_type(instruction)
    stored_dtype = emit.storage_type(dtype)
    lhs, rhs = emit.cast(lhs, stored_dtype), emit.cast(rhs, stored_dtype)
    operator = "BatchMatMul" if many else "MatMul"
    product = emit.apply(operator, [lhs, rhs, False, False], (*many, rows, columns), stored_dtype)
    return wrap_to_hlo_type(emit, emit.reshape(product, shape_of(instruction)), dtype)


def reduce(emit: Emitter, kind: str, x: ArrayValue, axes: list[int], dtype: str) -> ArrayValue:
    """Reduce over array axes with one of the REDUCERS."""
    if not axes:
        return x
    operator, _ = REDUCERS[kind]
    if x.dtype == "pred":
        operator = {"ReduceMax": "ReduceAny", "ReduceMin": "ReduceAll"}.get(operator, operator)
    elif operator in ("ReduceAll", "ReduceAny"):
        raise unsupported(f"reduction by {kind} of the bits of {dtype}")
    shape = [size for axis, size in enumerate(x.shape) if axis not in axes]
    settings: list[Any] = [tuple(axes), False]
    if operator == "ReduceSum":
        settings.append(False)
    result = emit.apply(operator, [x, *settings], shape, x.dtype)
    if kind in ("maximum", "minimum") and x.dtype in FLOATS and not emit.native:
        # On a CPU, MindSpore's operators ignore NaN.
        is_nan = emit.compare("NotEqual", x, x)
        any_nan = emit.apply("ReduceAny", [is_nan, *settings], shape, "pred")
        result = emit.select(any_nan, emit.literal(np.array(np.nan), x.dtype), result)
    return wrap_to_hlo_type(emit, result, dtype)


def combine_with_initial(
    emit: Emitter, kind: str, x: ArrayValue, initial: ArrayValue, dtype: str
) -> ArrayValue:
    """Combine a reduction with its initial value, unless that is the neutral element."""
    if initial.data is not None and _changes_nothing(kind, initial.data.flat[0], dtype):
        return x
    if x.dtype == "pred":
        return logical(emit, "and" if kind == "and" else "or", x, initial)
    operator, function = BINARY[kind]
    return wrap_to_hlo_type(emit, emit.elementwise(operator, function, [x, initial]), dtype)


def _changes_nothing(kind: str, value: Any, dtype: str) -> bool:
    if kind in ("add", "or"):
        return not value
    if kind in ("multiply", "and"):
        return value == 1
    if dtype in FLOATS:
        return value == (-np.inf if kind == "maximum" else np.inf)
    return False


def clamp(emit: Emitter, low: ArrayValue, x: ArrayValue, high: ArrayValue) -> ArrayValue:
    """Translate clamp: x limited to the range from `low` to `high`."""
    return emit.minimum(emit.maximum(x, low), high)
