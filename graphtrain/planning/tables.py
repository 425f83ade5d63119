"""Tables of plans: of columns, and with one row for each array, for a terminal and as JSON."""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from sharding_rules.plan import Plan


def printed_text(print_on: "Callable[[Console], None]") -> str:
    """Return as text without colors what a function prints on a console of rich."""
    import io

    from rich.console import Console

    text = io.StringIO()
    # Rich would show a notebook's output by itself, and color it.
    print_on(Console(file=text, width=160, force_jupyter=False, no_color=True, markup=False))
    return text.getvalue()


def plan_table(plan: "Plan", paths: Collection[str]) -> "Table":
    """Return a table of the named arrays: shape, axes, sharding, and bytes per device."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("array", "shape", "axes", "split", "bytes/device"):
        table.add_column(name, justify="right" if name[0] == "b" else "left", no_wrap=True)
    for path in paths:
        layout = plan.layouts[path]
        table.add_row(
            path.removeprefix("state/"),
            "x".join(map(str, layout.spec.shape)) or "scalar",
            ",".join(axis or "-" for axis in layout.spec.axes) or "-",
            ",".join("+".join(names) if names else "-" for names in layout.split) or "-",
            f"{plan.shard_bytes(path):,}",
        )
    return table


def plan_as_json(plan: "Plan") -> list[dict[str, Any]]:
    """Return the layouts of all arrays as JSON-compatible rows; sizes in bytes per device."""
    return [
        {
            "path": path,
            "role": layout.spec.role,
            "dtype": layout.spec.dtype,
            "shape": list(layout.spec.shape),
            "axes": list(layout.spec.axes),
            "split": [list(names) for names in layout.split],
            "shard_shape": list(plan.shard_shape(path)),
            "bytes": plan.shard_bytes(path),
        }
        for path, layout in plan.layouts.items()
    ]


def empty_table(*columns: str) -> "Table":
    """Return an empty table without borders; columns with the prefix ">" are right-aligned."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in columns:
        justify = "right" if name.startswith(">") else "left"
        table.add_column(name.removeprefix(">"), justify=justify, no_wrap=True)
    return table


def megabytes(count: float) -> str:
    """Format bytes as megabytes; fewer than are shown are not 0."""
    return "<0.1" if 0 < count < 5e4 else f"{count / 1e6:,.1f}"
