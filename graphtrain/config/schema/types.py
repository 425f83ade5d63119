"""Types that settings of several tables share."""

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from sharding_rules.paths import check_local_path

STRICT = ConfigDict(extra="forbid", strict=True)

MAX_LAYERS = 10_000  # plans, pipelines and weights handle layers one by one

Positive = Annotated[int, Field(ge=1)]
# Limits far beyond any model, below which a plan is made in seconds and its numbers can be printed.
Width = Annotated[int, Field(ge=1, le=10**7)]  # of an axis of a weight
Count = Annotated[int, Field(ge=1, le=10**9)]  # of tokens, sequences or rows
NotNegative = Annotated[int, Field(ge=0)]


def _of_float32(value: float) -> float:
    """Refuse a number that a program, which computes in float32, would take for another one.

    Raises:
        ValueError: it is 0 or infinite there.
    """
    if 0 < value < _SMALLEST_FLOAT32 or _INFINITE_IN_FLOAT32 <= value < math.inf:
        other = "0" if value < 1 else "infinite"
        raise ValueError(f"{value:g} is {other} in float32, in which programs compute")
    return value


def _below_one(value: float) -> float:
    """Refuse a rate that is 1 in float32, with which nothing would ever decay.

    Raises:
        ValueError: it is.
    """
    if value >= _ONE_IN_FLOAT32:
        raise ValueError(f"{value} is 1 in float32, in which programs compute; lower it")
    return value


_SMALLEST_FLOAT32 = 2.0**-126  # a smaller one is flushed to zero
_INFINITE_IN_FLOAT32 = (2 - 2.0**-24) * 2.0**127  # is rounded up, as all above it
_ONE_IN_FLOAT32 = 1 - 2.0**-25  # what is larger is rounded to 1
Float32 = AfterValidator(_of_float32)
BelowOne = AfterValidator(_below_one)
PositiveFloat = Annotated[float, Field(gt=0), Float32]
NotNegativeFloat = Annotated[float, Field(ge=0), Float32]
DecayRate = Annotated[float, Field(ge=0, lt=1), Float32, BelowOne]  # of a moving average
PositiveDecayRate = Annotated[float, Field(gt=0, lt=1), Float32, BelowOne]
Plain = str | bool | int | float | list[str | bool | int | float]  # arguments of user code
ComputeDtype = Literal["bfloat16", "float16", "float32"]
DropoutRate = Annotated[float, Field(ge=0, lt=1)]


def _local_path(path: str) -> str:
    try:
        return check_local_path(path)
    except ValueError as error:
        raise PydanticCustomError(WRONG_PATH, "{reason}", {"reason": str(error)}) from None


WRONG_PATH = "wrong_path"  # type of the errors of a LocalPath
LocalPath = Annotated[str, AfterValidator(_local_path)]  # of a file or directory; no URL


def set_derived_defaults(settings: object, **defaults: Any) -> None:
    """Set settings that were left out to values that depend on others.

    A resolved configuration file therefore states every value.
    """
    for name, value in defaults.items():
        if getattr(settings, name) is None:
            object.__setattr__(settings, name, value)


def item_bytes(dtype: str) -> int:
    """Return the bytes of one activation of a ComputeDtype."""
    return 4 if dtype == "float32" else 2
