"""Types that settings of several tables share."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid", strict=True)

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NotNegativeFloat = Annotated[float, Field(ge=0)]
DropoutRate = Annotated[float, Field(ge=0, lt=1)]


def set_derived_defaults(settings: object, **defaults: Any) -> None:
    """Set settings that were left out to values that depend on others.

    A resolved configuration file therefore states every value.
    """
    for name, value in defaults.items():
        if getattr(settings, name) is None:
            object.__setattr__(settings, name, value)
