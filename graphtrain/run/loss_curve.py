"""The loss curve of a run, drawn with characters for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

_LARGEST = 1e30  # loss in a chart; the library computes with sums and products of them


def loss_curve(records: Sequence[Mapping[str, Any]], width: int = 72, height: int = 16) -> str:
    """Return the training and validation loss by step as a text chart.

    Args:
        records: records of the journal.
        width: columns of the chart.
        height: lines of the chart.
    """
    from plotext import figure

    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    for name, key, marker in (
        ("training", "loss", "braille"),
        ("validation", "validation_loss", "o"),
    ):
        points = [
            (record["step"], record[key])
            for record in records
            if record.get(key) is not None and abs(record[key]) < _LARGEST  # not NaN
        ]
        if points:
            signal = figure.signal(*zip(*points, strict=True), marker=marker)
            figure.draw(signal.label(name))
    figure.label("step")
    return str(figure.build())
