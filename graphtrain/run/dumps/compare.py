"""Comparison of two dumps: the first array in the order of execution that differs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from graphtrain.errors import DumpError
from graphtrain.graphs.names import SUMMARY
from graphtrain.run.dumps.files import StoredDump, not_finite_reason
from graphtrain.weights.files import WeightFiles

# Largest difference that rounding explains, relative to an array; by the dtype of computation.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
_T = TypeVar("_T")
_PART = 1 << 22  # elements converted to float64 at once


@dataclass(frozen=True)
class ArrayDifference:
    """Difference of one array of two dumps, a and b."""

    step: int
    name: str
    # The larger of |a - b| / |a| (L2 norms) and max |a - b| / max |a|; infinity where the shapes or
    # the non-finite elements differ.
    relative: float
    max_abs: float  # max |a - b|; for summaries, of their statistics
    cosine: float | None  # None for summaries, and if an array is zero
    index: list[int] | None  # of the element with the largest difference
    values: tuple[float, float] | None  # of both dumps, at `index`
    reason: str  # what differs other than finite values; may be empty
    not_finite: int  # elements that are not finite in both, alike: nothing can be said of them
    lines: tuple[str, ...]  # of the model's code that made it; may be empty
    after: str | None  # the array before it in the order of execution
    differs: bool

    @property
    def equal(self) -> bool:
        """Return whether all elements are finite, and equal within the tolerance."""
        return not (self.differs or self.not_finite)

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON; non-finite numbers as strings."""
        values = None if self.values is None else [json_number(value) for value in self.values]
        return vars(self) | {
            "relative": json_number(self.relative),
            "max_abs": json_number(self.max_abs),
            "values": values,
        }


@dataclass(frozen=True)
class Comparison:
    """Differences of two dumps, in the order of execution."""

    tolerance: float
    differences: tuple[ArrayDifference, ...]  # of all arrays that both have
    only_in: tuple[tuple[str, ...], tuple[str, ...]]  # arrays that the other lacks
    only_steps: tuple[tuple[int, ...], tuple[int, ...]]  # steps that the other lacks
    common: bool  # whether what only one has does not count
    notes: tuple[str, ...]  # what else differs: settings, batches, versions

    @property
    def first(self) -> ArrayDifference | None:
        """First array that differs by more than the tolerance."""
        return next((one for one in self.differences if one.differs), None)

    @property
    def not_finite(self) -> tuple[ArrayDifference, ...]:
        """Arrays without a difference that are not finite in both: not compared."""
        return tuple(one for one in self.differences if one.not_finite and not one.differs)

    @property
    def is_equal(self) -> bool:
        """Return whether everything was compared, and is equal within the tolerance."""
        is_complete = self.common or not any((*self.only_in, *self.only_steps))
        return is_complete and all(one.equal for one in self.differences)

    def as_json(self) -> dict[str, Any]:
        return {
            "equal": self.is_equal,
            "tolerance": self.tolerance,
            "first": None if self.first is None else self.first.as_json(),
            "arrays": [one.as_json() for one in self.differences],
            "only_in_a": list(self.only_in[0]),
            "only_in_b": list(self.only_in[1]),
            "steps_only_in_a": list(self.only_steps[0]),
            "steps_only_in_b": list(self.only_steps[1]),
            "not_finite": len(self.not_finite),
            "notes": list(self.notes),
        }


def compare_dumps(
    a: StoredDump,
    b: StoredDump,
    *,
    tolerance: float | None = None,
    absolute: float = 0.0,
    common: bool = False,
) -> Comparison:
    """Compare the arrays that two dumps have in common, step by step.

    Args:
        a: the dump to trust.
        b: the other one.
        tolerance: relative difference up to which arrays count as equal; None: what rounding in the
            coarser of the two dtypes explains.
        absolute: differences of at most this count as equal in any case, for arrays that are zero
            but for rounding.
        common: whether arrays and steps that only one has do not count.

    Raises:
        DumpError: no step or no array is in both, or a file is damaged.
    """
    steps, steps_of_b = ([entry["step"] for entry in dump.index.steps] for dump in (a, b))
    common_steps = [step for step in steps if step in steps_of_b]
    if not common_steps:
        raise DumpError(
            f"{a.directory} has steps {_range(steps)}, and {b.directory} "
            f"{_range(steps_of_b)}: none in common; start both dumps from the same checkpoint "
            "(--step)"
        )
    of_a = {one.name: one for one in a.index.arrays}
    of_b = {one.name: one for one in b.index.arrays}
    common_names = [name for name in of_a if name in of_b]
    if not common_names:
        raise DumpError(f"{a.directory} and {b.directory} have no array in common")
    if tolerance is None:
        known = [TOLERANCES[dump.index.dtype] for dump in (a, b) if dump.index.dtype in TOLERANCES]
        tolerance = max(known, default=TOLERANCES["float32"])
    differences = []
    for step in common_steps:
        files = a.arrays(step), b.arrays(step)
        before = None
        for name in common_names:
            shapes = a.index.shape(of_a[name], step), b.index.shape(of_b[name], step)
            measured = _measure(name, files, (a, b), shapes)
            differs = measured["relative"] > tolerance and not measured["max_abs"] <= absolute
            lines = tuple(of_b[name].lines or of_a[name].lines)
            differences.append(
                ArrayDifference(
                    step=step, name=name, lines=lines, after=before, differs=differs, **measured
                )
            )
            before = name
    return Comparison(
        tolerance,
        tuple(differences),
        only_in=_only(list(of_a), list(of_b)),
        only_steps=_only(steps, steps_of_b),
        common=common,
        notes=tuple(_notes(a, b, common_steps)),
    )


def _only(a: Sequence[_T], b: Sequence[_T]) -> tuple[tuple[_T, ...], tuple[_T, ...]]:
    """Return what only the first of two lists has, and what only the second."""
    of_a, of_b = set(a), set(b)
    return tuple(one for one in a if one not in of_b), tuple(one for one in b if one not in of_a)


def _measure(
    name: str,
    files: tuple[WeightFiles, WeightFiles],
    dumps: tuple[StoredDump, StoredDump],
    shapes: tuple[list[int], list[int]],
) -> dict[str, Any]:
    if shapes[0] != shapes[1]:
        return _unlike(f"shapes {shapes[0]} and {shapes[1]}")
    a, b = files[0].read(name), files[1].read(name)
    is_summary = [dump.index.stores_summary(name) for dump in dumps]
    if any(is_summary):
        return compare_summaries(
            a if is_summary[0] else summary_of(a), b if is_summary[1] else summary_of(b)
        )
    return compare_arrays(a, b)


def compare_arrays(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """Return the measures of ArrayDifference for two arrays of the same shape."""
    flat = a.reshape(-1), b.reshape(-1)
    sums = np.zeros(4)  # of squares of a, b and a - b, and of products
    largest, worst, worst_at, not_finite = 0.0, -1.0, 0, 0
    for begin in range(0, a.size, _PART):
        x, y = (each[begin : begin + _PART].astype(np.float64) for each in flat)
        finite = np.isfinite(x)
        unlike = (finite != np.isfinite(y)) | (~finite & (x != y) & ~(np.isnan(x) & np.isnan(y)))
        if unlike.any():
            at = begin + int(unlike.argmax())
            found = _unlike(f"{int(unlike.sum())} non-finite elements in one of them only")
            return found | _place(a, b, at)
        not_finite += int((~finite).sum())
        x, y = np.where(finite, x, 0), np.where(finite, y, 0)
        gap = np.abs(x - y)
        sums += [np.dot(x, x), np.dot(y, y), np.dot(gap, gap), np.dot(x, y)]
        largest = max(largest, float(np.abs(x).max(initial=0)))
        if gap.size and gap.max() > worst:
            worst, worst_at = float(gap.max()), begin + int(gap.argmax())
    norm_a, norm_b, norm_gap = np.sqrt(sums[:3])
    worst = max(worst, 0.0)
    relative = max(_ratio(norm_gap, norm_a), _ratio(worst, largest))
    cosine = float(sums[3] / (norm_a * norm_b)) if norm_a and norm_b else None
    measures = {
        "relative": relative,
        "max_abs": worst,
        "cosine": cosine,
        "reason": "",
        "not_finite": not_finite,
    }
    return measures | (_place(a, b, worst_at) if worst else {"index": None, "values": None})


def compare_summaries(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """Return the measures of ArrayDifference for two summaries."""
    mine, other = (dict(zip(SUMMARY, map(float, each), strict=True)) for each in (a, b))
    if mine["non_finite"] != other["non_finite"]:
        return _unlike(
            f"{mine['non_finite']:.0f} and {other['non_finite']:.0f} non-finite elements"
        )
    gaps = {name: abs(mine[name] - other[name]) for name in ("norm", "max_abs", "mean")}
    relative = max(
        _ratio(gaps["norm"], mine["norm"]),
        _ratio(gaps["max_abs"], mine["max_abs"]),
        _ratio(gaps["mean"], mine["max_abs"]),  # a mean may be zero but for rounding
    )
    largest = max(gaps.values())
    return {"relative": relative, "max_abs": largest, "cosine": None, "reason": ""} | {
        "index": None,
        "values": (mine["norm"], other["norm"]),
        "not_finite": int(mine["non_finite"]),
    }


def summary_of(array: np.ndarray) -> np.ndarray:
    """Return the statistics of `names.SUMMARY`; those but the last of the finite elements."""
    values = array.reshape(-1).astype(np.float64)
    finite = values[np.isfinite(values)]
    statistics = (
        np.sqrt(np.square(finite).sum()),
        np.abs(finite).max(initial=0),
        finite.mean() if finite.size else 0,
        (values == 0).mean() if values.size else 0,
        values.size - finite.size,
    )
    return np.array(statistics, np.float32)


def _ratio(gap: float, size: float) -> float:
    if gap == 0:
        return 0.0
    return float(gap / size) if size else math.inf


def _unlike(reason: str) -> dict[str, Any]:
    return {
        "relative": math.inf,
        "max_abs": math.inf,
        "cosine": None,
        "index": None,
        "values": None,
        "reason": reason,
        "not_finite": 0,
    }


def _place(a: np.ndarray, b: np.ndarray, position: int) -> dict[str, Any]:
    index = [int(one) for one in np.unravel_index(position, a.shape)]
    values = float(a.reshape(-1)[position]), float(b.reshape(-1)[position])
    return {"index": index, "values": values}


def _notes(a: StoredDump, b: StoredDump, steps: list[int]) -> Iterator[str]:
    """Yield what else differs between two dumps."""
    if a.index.identity and b.index.identity:
        for name in a.index.identity | b.index.identity:
            mine, other = a.index.identity.get(name), b.index.identity.get(name)
            if mine != other and name != "run.steps":
                yield f"{name}: {mine} and {other}"
    batches = [{one["step"]: one["batch"] for one in dump.index.steps} for dump in (a, b)]
    if unlike := [step for step in steps if batches[0][step] != batches[1][step]]:
        yield f"the batches differ, from step {unlike[0]} on"
    for letter, dump in zip("AB", (a, b), strict=True):
        for entry in dump.index.steps:
            if entry["step"] in steps and (
                reason := not_finite_reason(entry, len(dump.index.arrays))
            ):
                yield f"step {entry['step']} in {letter} {reason}"
    for name in ("target", "mesh"):
        mine, other = getattr(a.index, name), getattr(b.index, name)
        if mine != other:
            yield f"{name}: {mine} and {other}"
    for name, mine in a.index.versions.items():
        if (other := b.index.versions.get(name, mine)) != mine:
            yield f"{name}: {mine} and {other}"


def _range(steps: list[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0])


def json_number(value: float) -> float | str:
    """Return a number as JSON has it; "inf" or "nan" as a string."""
    return value if math.isfinite(value) else str(value)
