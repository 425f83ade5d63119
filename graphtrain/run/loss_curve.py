"""The loss curve of a run, drawn with characters for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

_LARGEST = 1e30  # value in a chart; the library computes with sums and products of them
_WIDTH, _HEIGHT = 72, 16  # columns and lines

Points = Sequence[tuple[float, float]]


def loss_curve(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the training and validation loss by step as a text chart.

    Args:
        records: records of the journal.
    """
    series = {
        name: [(one["step"], one[key]) for one in records if one.get(key) is not None]
        for name, key in (("training", "loss"), ("validation", "validation_loss"))
    }
    return line_chart(series, markers={"training": "braille"})


def line_chart(series: Mapping[str, Points], markers: Mapping[str, str] | None = None) -> str:
    """Return values by step as a text chart.

    Args:
        series: steps and values of each line; what is not finite is left out.
        markers: how the points of a line are drawn, if not as circles.
    """
    from plotext import figure

    figure.clear()
    figure.theme("colorless")
    figure.plot_size(_WIDTH, _HEIGHT)
    signs = iter("ox+*#@%&" * len(series))
    for name, given in series.items():
        points = [(step, value) for step, value in given if abs(value) < _LARGEST]  # not NaN
        marker = (markers or {}).get(name) or next(signs)
        if points:
            signal = figure.signal(*zip(*points, strict=True), marker=marker)
            figure.draw(signal.label(name))
    figure.label("step")
    return str(figure.build())
