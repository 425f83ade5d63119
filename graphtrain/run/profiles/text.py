"""Profile of a run as text, as JSON and as a page."""

from __future__ import annotations

import html
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphtrain.run.profiles.account import Profile

PAGE_MARK = '<meta name="generator" content="graphtrain profile">'
_MOST_ROWS = 20  # of a table in text; JSON and the page have all

Row = tuple[str, ...]


def profile_text(profile: Profile, most: int | None = _MOST_ROWS) -> str:
    """Return the tables as text: totals, collectives, kernels."""
    parts = [_title(profile), ""]
    for heading, rows in _tables(profile).items():
        shown = rows if most is None else rows[: most + 1]
        parts += [heading, *_aligned(shown)]
        if len(shown) < len(rows):
            parts.append(f"  and {len(rows) - len(shown)} more (--json or --html has all)")
        parts.append("")
    paths = "\n".join(f"  {path}" for path in profile.traces)
    return "\n".join(parts) + f"Traces for xprof and Perfetto:\n{paths}"


def profile_json(profile: Profile) -> dict[str, Any]:
    """Return the profile as JSON; seconds are those of one step, and null is unknown."""
    fields = asdict(profile)
    fields["directory"] = str(profile.directory)
    fields["traces"] = [str(path) for path in profile.traces]
    fields["totals"] = {
        name: {"measured": measured, "predicted": predicted}
        for name, (measured, predicted) in profile.totals.items()
    }
    fields["collectives"] = [
        asdict(one) | {"wire_bytes_per_step": one.collective.wire_bytes_per_step}
        for one in profile.collectives
    ]
    return fields


def profile_page(profile: Profile) -> str:
    """Return an HTML page with all rows, and bars of measured and predicted time."""
    title = html.escape(_title(profile))
    tables = "".join(_table(name, rows) for name, rows in _tables(profile).items())
    traces = "".join(f"<li>{html.escape(str(path))}</li>" for path in profile.traces)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">{PAGE_MARK}<title>{title}</title><style>
body {{ font-family: system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; margin-bottom: 2rem }}
th, td {{ padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd }}
th:first-child, td:first-child {{ text-align: left }}
svg {{ width: 100%; height: auto; margin-bottom: 2rem }}
</style></head><body><h1>{title}</h1>{_picture(profile)}{tables}
<p>Traces, for xprof and Perfetto:</p><ul>{traces}</ul></body></html>
"""


def _title(profile: Profile) -> str:
    measured, predicted = _time(profile.measured_step), _time(profile.predicted_step)
    devices = f"{profile.devices} device{'s' if profile.devices > 1 else ''}"
    least = "" if profile.is_complete or profile.predicted_step is None else "at least "
    processes = f" of {profile.processes} processes" if profile.processes > 1 else ""
    return (
        f"{profile.directory}: steps {profile.first_step} to {profile.last_step} on "
        f"{profile.target}, {devices}{processes}: {measured} a step, predicted {least}{predicted}"
    )


def _tables(profile: Profile) -> dict[str, list[Row]]:
    """Return the tables by heading; the first row is that of the column names."""
    totals = [("work", "measured", "predicted", "ratio")]
    for name, (measured, predicted) in profile.totals.items():
        totals.append((name, _time(measured), _time(predicted), _ratio(measured, predicted)))
    names = ("collective", "times", "sent", "measured", "fastest", "predicted", "ratio", "source")
    collectives: list[Row] = [names]
    for one in profile.collectives:
        what = one.collective
        collectives.append(
            (
                f"{what.op} {'+'.join(what.axes)}",
                str(what.count),
                _bytes(what.wire_bytes_per_step),
                _time(one.measured),
                _time(one.fastest),
                _time(one.predicted),
                _ratio(one.measured, one.predicted),
                what.source or what.scope,
            )
        )
    kernels: list[Row] = [
        ("kernels", "kind", "operations", "measured", "predicted", "ratio", "FLOP/s")
    ]
    for each in profile.kernels:
        speed = each.flops / each.measured if each.flops and each.measured else None
        kernels.append(
            (
                each.part,
                each.kind,
                str(each.operations),
                _time(each.measured),
                _time(each.predicted),
                _ratio(each.measured, each.predicted),
                "-" if speed is None else f"{speed:.3g}",
            )
        )
    tables = {"Time of a step on a device": totals, "Collectives": collectives, "Kernels": kernels}
    return {name: rows for name, rows in tables.items() if len(rows) > 1}


def _aligned(rows: list[Row]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if column in (0, 7) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _table(name: str, rows: list[Row]) -> str:
    head, *body = [[html.escape(cell) for cell in row] for row in rows]
    cells = "".join(f"<th>{cell}</th>" for cell in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in body)
    return f"<h2>{html.escape(name)}</h2><table><tr>{cells}</tr>{lines}</table>"


def _picture(profile: Profile) -> str:
    """Return bars of the measured and the predicted seconds of each kind of work."""
    values = [value or 0.0 for pair in profile.totals.values() for value in pair]
    scale, rows = 700 / max([*values, 1e-12]), []
    for index, (name, pair) in enumerate(profile.totals.items()):
        for line, (label, value) in enumerate(zip(("measured", "predicted"), pair, strict=True)):
            top = index * 56 + line * 24
            color = "#0277bd" if label == "measured" else "#9e9e9e"
            rows.append(
                f'<text x="0" y="{top + 16}" font-size="13">{name}, {label}</text>'
                f'<rect x="190" y="{top + 2}" width="{(value or 0.0) * scale:.1f}" height="18" '
                f'fill="{color}"/><text x="{200 + (value or 0.0) * scale:.1f}" y="{top + 16}" '
                f'font-size="13">{_time(value)}</text>'
            )
    height = 56 * len(profile.totals)
    return (
        f'<svg viewBox="0 0 1000 {height}" role="img" aria-label="measured and predicted time">'
        f"{''.join(rows)}</svg>"
    )


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{1e3 * seconds:,.3f} ms" if seconds < 1 else f"{seconds:,.3f} s"


def _ratio(measured: float, predicted: float | None) -> str:
    return "-" if not predicted else f"{measured / predicted:,.2f}"


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
