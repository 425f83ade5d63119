"""Differences between two assessments: placement, memory, communication and time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from graphtrain.cost_model.assessment import Assessment
from graphtrain.planning.traffic_by_axes import sum_by_axes
from lowering.trees import path_suffixes
from sharding_rules.plan import Plan

Kind = Literal["placement", "memory", "communication", "time"]

_MFU = "MFU"
_MEMORY = (
    "parameters",
    "frozen",
    "optimizer",
    "gradients",
    "activations",
    "temporaries",
    "peak",
    "capacity",
)


@dataclass(frozen=True)
class PlanChange:
    """One difference between two assessments; a value is None if one of them does not have it."""

    kind: Kind
    what: str
    before: str | float | None
    after: str | float | None
    unit: str = ""  # unit of numeric values

    @property
    def ratio(self) -> float | None:
        """Ratio of after to before; None for values that are not numbers."""
        numbers = isinstance(self.before, int | float) and isinstance(self.after, int | float)
        return self.after / self.before if numbers and self.before else None  # type: ignore[operator]


def differences(before: Assessment, after: Assessment) -> list[PlanChange]:
    """Return all differences, ordered by kind.

    Optimizer state that changes in the same way as its parameter is left out.
    """
    return [
        *_without_matching_moments(_compare("placement", _placement(before), _placement(after))),
        *_compare("memory", _memory(before), _memory(after), "bytes"),
        *_compare("communication", _counts(before), _counts(after), "a step"),
        *_compare("communication", _sent(before), _sent(after), "bytes"),
        *_compare("time", _time_source(before), _time_source(after)),
        *_compare("time", _time(before), _time(after), "s"),
        *_compare("time", {_MFU: _or_unknown(before.mfu)}, {_MFU: _or_unknown(after.mfu)}),
    ]


def _compare(
    kind: Kind, before: Mapping[str, str | float], after: Mapping[str, str | float], unit: str = ""
) -> Iterator[PlanChange]:
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            yield PlanChange(kind, name, before.get(name), after.get(name), unit)


def _without_matching_moments(changes: Iterable[PlanChange]) -> Iterator[PlanChange]:
    """Yield all changes except moments that change in the same way as their parameter."""
    changes = list(changes)
    parameters = {
        one.what.removeprefix("state/parameters/"): (one.before, one.after)
        for one in changes
        if one.what.startswith("state/parameters/")
    }
    for one in changes:
        follows = one.what.startswith("state/optimizer/") and any(
            parameters.get(tail) == (one.before, one.after) for tail in path_suffixes(one.what)
        )
        if not follows:
            yield one


def _placement(of: Assessment) -> dict[str, str | float]:
    placements: dict[str, str | float] = {"target": of.target, "mesh": str(of.plan.mesh)}
    return placements | {path: placement(of.plan, path) for path in of.plan.layouts}


def placement(plan: Plan, path: str) -> str:
    """Return an array's dtype, shape and split as text, for example "float32 64x16(tensor)"."""
    layout = plan.layouts[path]
    sizes = (
        f"{size}({'+'.join(names)})" if names else str(size)
        for size, names in zip(layout.spec.shape, layout.split, strict=True)
    )
    where = "" if layout.spec.memory == "device" else f" in {layout.spec.memory} memory"
    return f"{layout.spec.dtype} {'x'.join(sizes) or 'scalar'}{where}"


def _memory(of: Assessment) -> dict[str, str | float]:
    return {name: getattr(of.memory, name) for name in _MEMORY}


def _counts(of: Assessment) -> dict[str, str | float]:
    return {f"{row.op} over {row.axes}": row.count for row in sum_by_axes(of.collectives)}


def _sent(of: Assessment) -> dict[str, str | float]:
    rows = sum_by_axes(of.collectives)
    return {f"{row.op} over {row.axes}, sent": round(row.wire_bytes) for row in rows}


def _time_source(of: Assessment) -> dict[str, str | float]:
    """Return by what the step time is known; times by a profile and by a roofline are unlike."""
    return {"source": of.time.source}


def _time(of: Assessment) -> dict[str, str | float]:
    time = of.time
    parts: dict[str, float | None] = {"compute": time.compute, "memory": time.memory}
    parts |= {f"communication over {axes}": seconds for axes, seconds in time.communication.items()}
    parts |= {"overlapped": time.overlapped, "bubble": time.bubble}
    parts |= {"host memory": time.host, "starting operations": time.starting, "step": time.total}
    return {name: _or_unknown(value) for name, value in parts.items()}


def _or_unknown(value: float | None) -> str | float:
    return "unknown" if value is None else value
