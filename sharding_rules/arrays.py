"""ArraySpec: description of an array without data."""

import math
from dataclasses import dataclass
from typing import Literal

from sharding_rules.axes import ARRAY_AXES, check_axes
from sharding_rules.errors import ShardingError

# frozen: weights without gradients and optimizer state, sharded by the rules of parameters.
# constant: values among the parameters that no step changes, such as buffers of an imported model.
# buffer: values among the parameters that a step changes, but not by their gradients.
Role = Literal["parameter", "buffer", "constant", "frozen", "gradient", "optimizer", "activation"]

Memory = Literal["device", "host"]

_ITEM_BYTES = {"bool": 1, "bfloat16": 2}


@dataclass(frozen=True)
class ArraySpec:
    """Shape, array axis of each dimension (None: never split), dtype, role and memory."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: str = "float32"
    role: Role = "parameter"
    memory: Memory = "device"  # memory that stores the array between steps

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ShardingError(
                f"shape {self.shape} and axes {self.axes} differ in length; name one axis for each "
                "dimension"
            )
        check_axes(self.axes, ARRAY_AXES, f"array of shape {self.shape}")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element of a dtype, for example "bfloat16" or "float8_e4m3fn"."""
    if dtype in _ITEM_BYTES:
        return _ITEM_BYTES[dtype]
    bits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())
    return max(1, int(bits) // 8)
