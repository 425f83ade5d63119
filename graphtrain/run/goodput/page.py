"""HTML page of a run's goodput: a picture of its starts, and the table. Needs no network."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from itertools import pairwise

from graphtrain.run.goodput.account import Goodput, Piece
from graphtrain.run.goodput.activities import BUCKETS
from graphtrain.run.goodput.text import goodput_text

PAGE_MARK = '<meta name="generator" content="graphtrain goodput">'
_WIDTH, _ROW = 1000, 26  # pixels of the picture; height of one start
COLORS = dict(
    zip(
        BUCKETS,
        ("#2e7d32", "#6a1b9a", "#8d6e63", "#f9a825", "#0277bd", "#00897b", "#4dd0e1", "#9e9d24",
         "#c62828", "#9e9e9e", "#000000"),
        strict=True,
    )
)  # fmt: skip


def goodput_page(goodput: Goodput) -> str:
    """Return the page: one bar over the whole run, one for each start, and the tables."""
    rows = [("all", list(_joined(goodput.pieces)))]
    for number, process in enumerate(goodput.processes, 1):
        end = process.started_at + process.seconds
        own = [one for one in goodput.pieces if process.started_at <= one.start < end]
        rows.append((str(number), list(_joined(own))))
    title = html.escape(f"Goodput of {goodput.directory}")
    bars = "".join(_bar(label, pieces, index) for index, (label, pieces) in enumerate(rows))
    legend = "".join(
        f'<li><span style="background:{COLORS[name]}"></span>{name}: {html.escape(meaning)}</li>'
        for name, meaning in BUCKETS.items()
        if goodput.seconds[name]
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">{PAGE_MARK}<title>{title}</title><style>
body {{ font-family: system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }}
ul {{ list-style: none; padding: 0 }}
li span {{ display: inline-block; width: 1em; height: 1em; margin-right: .5em }}
svg {{ width: 100%; height: auto }} pre {{ overflow-x: auto }}
</style></head><body><h1>{title}</h1>
<p>Goodput {goodput.goodput:.1%}. Each bar is as wide as its time; the first is the whole run, the
others are its starts.</p>
<svg viewBox="0 0 {_WIDTH + 40} {len(rows) * _ROW}" role="img" aria-label="time of each start">
{bars}</svg>
<ul>{legend}</ul><pre>{html.escape(goodput_text(goodput))}</pre></body></html>
"""


def _bar(label: str, pieces: Sequence[Piece], index: int) -> str:
    """Return a row: a label, and a rectangle for each piece with its time as a tooltip."""
    top = index * _ROW
    text = f'<text x="0" y="{top + 16}" font-size="12">{label}</text>'
    if not pieces:
        return text
    begin = pieces[0].start
    scale = _WIDTH / max(pieces[-1].start + pieces[-1].seconds - begin, 1e-9)
    return text + "".join(
        f'<rect x="{40 + (one.start - begin) * scale:.2f}" y="{top + 2}" '
        f'width="{one.seconds * scale:.2f}" height="{_ROW - 6}" fill="{COLORS[one.bucket]}">'
        f"<title>{one.bucket}: {one.seconds:,.2f} s</title></rect>"
        for one in pieces
    )


def _joined(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Join neighbours of one bucket, of which a long run has thousands."""
    if not pieces:
        return
    first = pieces[0]
    for one, following in pairwise([*pieces, None]):
        assert one is not None
        if following is None or following.bucket != one.bucket:
            yield Piece(first.start, one.start + one.seconds - first.start, first.bucket)
            first = following or one
