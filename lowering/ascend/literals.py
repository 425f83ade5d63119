"""Constants of an HLO module as NumPy arrays. Source: xla/xla_data.proto, LiteralProto."""

import ml_dtypes
import numpy as np

from lowering.errors import LoweringError
from lowering.hlo.proto import TYPE_NAMES, Message

_FIELDS: dict[str, tuple[str, type]] = {
    "pred": ("preds", np.bool_),
    "s8": ("s8s", np.int8),
    "u8": ("u8s", np.uint8),
    "s16": ("s16s", np.int16),
    "u16": ("u16s", np.uint16),
    "s32": ("s32s", np.int32),
    "u32": ("u32s", np.uint32),
    "s64": ("s64s", np.int64),
    "u64": ("u64s", np.uint64),
    "f16": ("f16s", np.float16),
    "bf16": ("bf16s", ml_dtypes.bfloat16),
    "f32": ("f32s", np.float32),
    "f64": ("f64s", np.float64),
}


def literal_to_numpy(literal: Message) -> np.ndarray:
    """Return the elements of a constant.

    Raises:
        LoweringError: MindIR has no counterpart of their type.
    """
    name = TYPE_NAMES[literal.shape.element_type]
    if name not in _FIELDS:
        raise LoweringError(f"a constant of {name} has no counterpart in MindIR")
    field, dtype = _FIELDS[name]
    stored = getattr(literal, field)
    flat = np.frombuffer(stored, dtype) if isinstance(stored, bytes) else np.array(stored, dtype)
    shape = tuple(literal.shape.dimensions)
    order = list(literal.shape.layout.minor_to_major)
    if order == sorted(order, reverse=True):
        return flat.reshape(shape)
    slow_first = order[::-1]  # axes from slowest to fastest in memory
    return flat.reshape([shape[axis] for axis in slow_first]).transpose(np.argsort(slow_first))
