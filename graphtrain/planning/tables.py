"""Placement tables of a plan: one row for each array, for a terminal and as JSON."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from sharding_rules.plan import Plan


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
