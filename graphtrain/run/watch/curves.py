"""Metrics by step as curves of a bounded number of points, however long a run is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_MOST_POINTS = 600  # of each curve
_MOST_NAMES = 300
_LARGEST = 1e30  # as in a chart of the terminal; what is larger is not drawn

# [last step, number of values, mean, lowest, highest, sequence number of the last change]
_Point = list[Any]


class Curves:
    """Mean, lowest and highest value of each metric in intervals of steps of equal width.

    The width doubles whenever there are too many intervals. Points are then other ones, and
    `epoch` another number.
    """

    def __init__(self, most_points: int = _MOST_POINTS) -> None:
        self._most_points = most_points
        self._points: dict[str, dict[int, _Point]] = {}
        self._intervals: set[int] = set()
        self.width = 1  # steps
        self.epoch = 0
        self.sequence = 0  # number of records
        self.last_step = 0
        self.not_finite: dict[str, int] = {}  # records without a finite value of a metric
        self.latest: dict[str, float] = {}

    def add(self, record: Mapping[str, float | int | None]) -> None:
        """Add a record of metrics.jsonl."""
        step = int(record["step"] or 0)
        self.sequence += 1
        self.last_step = max(self.last_step, step)
        for name, value in record.items():
            if name == "step" or (name not in self._points and len(self._points) >= _MOST_NAMES):
                continue
            if value is None or not abs(value) < _LARGEST:
                self.not_finite[name] = self.not_finite.get(name, 0) + 1
                continue
            self.latest[name] = value
            point = [step, 1, value, value, value, self.sequence]
            _merge(self._points.setdefault(name, {}), step // self.width, point)
            self._intervals.add(step // self.width)
        while len(self._intervals) > self._most_points:
            self._widen()

    def changed(self, since: int) -> dict[str, list[list[float]]]:
        """Return the points that changed after a sequence number, by metric.

        A point is the last step of its interval, and the mean, lowest and highest value; of one
        value, the step and the value.
        """
        found = {name: list(_changed(points, since)) for name, points in self._points.items()}
        return {name: points for name, points in found.items() if points}

    def highest(self, name: str) -> float | None:
        """Return the highest value of a metric; None without one."""
        return max((point[4] for point in self._points.get(name, {}).values()), default=None)

    def _widen(self) -> None:
        self.width *= 2
        self.epoch += 1
        self._intervals = {interval // 2 for interval in self._intervals}
        for name, points in self._points.items():
            merged: dict[int, _Point] = {}
            for interval in sorted(points):
                _merge(merged, interval // 2, points[interval])
            self._points[name] = merged


def _merge(points: dict[int, _Point], interval: int, other: _Point) -> None:
    point = points.get(interval)
    if point is None:
        points[interval] = list(other)
        return
    step, count, mean, lowest, highest, changed = other
    point[0] = max(point[0], step)
    point[1] += count
    point[2] += (mean - point[2]) * count / point[1]
    point[3], point[4] = min(point[3], lowest), max(point[4], highest)
    point[5] = max(point[5], changed)


def _changed(points: Mapping[int, _Point], since: int) -> Iterator[list[float]]:
    for interval in sorted(points):
        step, count, mean, lowest, highest, changed = points[interval]
        if changed > since:
            values = [mean] if count == 1 else [mean, lowest, highest]
            yield [step, *map(_rounded, values)]


def _rounded(value: float) -> float:
    return float(f"{value:.7g}")
