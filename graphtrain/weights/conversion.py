"""Summary and progress of conversions between formats of weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from graphtrain.config.schema import Model
from graphtrain.models.flops import parameter_count
from graphtrain.weights.families import Family

Progress = Callable[
    [int, int], None
]  # called with the number of finished groups of arrays and of all


@dataclass(frozen=True)
class ConversionSummary:
    """Summary of a conversion."""

    family: str
    parameters: int  # number of parameters
    arrays: int  # number of arrays
    dtype: str


def summarize(
    family: Family, model: Model, arrays: dict[str, tuple[np.dtype, tuple[int, ...]]]
) -> ConversionSummary:
    """Summarize the conversion of a model to these arrays, given by name as dtype and shape."""
    dtypes = Counter(str(dtype) for dtype, _ in arrays.values())
    return ConversionSummary(
        family.model_type,
        parameter_count(model),
        len(arrays),
        " and ".join(name for name, _ in dtypes.most_common()),
    )
