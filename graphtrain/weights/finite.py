"""Weights that are NaN or infinite: refused where training starts, reported in exports.

The bits of the exponent are compared instead of values, because that is as fast for bfloat16 as for
float32, and each array is counted while it is in memory anyway.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from graphtrain.errors import WeightsError
from graphtrain.weights.files import WeightFiles

# Bits that are all set in NaN and in infinity, and the integers to read them as.
_EXPONENTS = {
    "float32": (np.uint32, 0x7F800000),
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
}
_CHUNK = 4 << 20  # elements that are compared at once


def count_not_finite(array: np.ndarray) -> int:
    """Count the elements that are NaN or infinite; arrays of integers have none."""
    bits, exponent = _EXPONENTS.get(array.dtype.name, (None, 0))
    if bits is None:
        return 0
    mask = bits(exponent)
    return sum(int(np.count_nonzero((part.view(bits) & mask) == mask)) for part in _chunks(array))


def _chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    if array.size <= _CHUNK:
        yield array
        return
    step = max(1, _CHUNK // (array.size // len(array)))
    for begin in range(0, len(array), step):
        yield array[begin : begin + step]


def read_finite(files: WeightFiles, name: str) -> np.ndarray:
    """Read a complete array of weights that training starts from.

    Raises:
        WeightsError: elements are NaN or infinite.
    """
    return require_finite(files.read(name), name)


def require_finite(array: np.ndarray, name: str, source: Path | None = None) -> np.ndarray:
    """Return an array of weights that training starts from.

    Args:
        array: The array, or the part that this process reads.
        name: Its name, for the error.
        source: The folder that it is in, for the error, unless the command names it.

    Raises:
        WeightsError: elements are NaN or infinite.
    """
    if count := count_not_finite(array):
        place = f"{source}: " if source else ""
        raise WeightsError(
            f"{place}{count:,} of {array.size:,} values of {name} are NaN or infinite, and "
            "nothing can be trained from them; the file is damaged, or was saved after training "
            "diverged: get it again, or use an earlier one"
        )
    return array


class ExportedValues:
    """Casts weights to the dtype of their export, and counts those that are not finite."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def cast(self, name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return an array in a dtype.

        Args:
            name: Name of the tensor.
            array: Its values.
            dtype: Of the result.

        Raises:
            WeightsError: a finite value is too large for the dtype.
        """
        with np.errstate(over="ignore"):
            result = array.astype(dtype, copy=False)
        count = count_not_finite(result)
        if count:
            before = count if result is array else count_not_finite(array)
            if count > before:
                raise WeightsError(
                    f"{name} has {count - before:,} values that are too large for {dtype.name}; "
                    "use --dtype float32 or --dtype bfloat16"
                )
            self._counts[name] = count
        return result

    def report(self, source: object) -> None:
        """Warn of the tensors that have elements which are NaN or infinite.

        Args:
            source: Folder that they come from.
        """
        _warn(self._counts, f"{source} has values that are NaN or infinite, and so has the export")


def warn_of_not_finite(tensors: Mapping[str, np.ndarray], destination: Path) -> None:
    """Warn of the tensors of an export that have elements which are NaN or infinite.

    Args:
        tensors: Tensors by name.
        destination: Folder that they are written to.
    """
    counts = {name: count_not_finite(tensor) for name, tensor in tensors.items()}
    bad = {name: count for name, count in counts.items() if count}
    _warn(bad, f"{destination}: the export has values that are NaN or infinite")


def _warn(counts: Mapping[str, int], problem: str) -> None:
    if counts:
        first = [f"{name} ({count:,})" for name, count in list(counts.items())[:3]]
        others = f" and {len(counts) - 3} more" if len(counts) > 3 else ""
        warnings.warn(
            f"{problem}: {', '.join(first)}{others}; use an earlier checkpoint", stacklevel=4
        )
