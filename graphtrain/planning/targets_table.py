"""Table that compares one program on several targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from graphtrain.planning.costs import Workload
from graphtrain.planning.formats import format_seconds, format_share
from graphtrain.planning.tables import empty_table, megabytes
from graphtrain.planning.targets import TargetRow

if TYPE_CHECKING:
    from rich.table import Table

    from graphtrain.cost_model.assessment import Assessment


def targets_table(rows: Sequence[TargetRow], workload: Workload) -> Table:
    """Return the table that compares targets, one row for each.

    Of a run with phases, the memory is that of the phase that needs most, the step's time that of
    the last.
    """
    table = empty_table(
        "target",
        "mesh",
        "source",
        "fits",
        ">peak MB",
        ">of MB",
        ">step s",
        ">MFU",
        *workload.columns,
        ">compile s",
    )
    for row in rows:
        assessment, largest = row.assessment, row.largest
        if assessment is None or largest is None:
            table.add_row(row.target, "", "error")
            continue
        memory, compile_seconds = largest.memory, assessment.compile_seconds
        sizes = (
            megabytes(memory.peak),
            megabytes(memory.capacity),
            _at_least(assessment),
            format_share(assessment.mfu),
        )
        fits = "yes" if memory.fits else "no: refused" if memory.compiler_out_of_memory else "no"
        compiled = "-" if compile_seconds is None else f"{compile_seconds:.1f}"
        table.add_row(
            row.target,
            str(assessment.plan.mesh),
            memory.source,
            fits,
            *sizes,
            *workload.cells(row.cost),
            compiled,
        )
    return table


def _at_least(assessment: Assessment) -> str:
    time = assessment.time
    bound = "" if time.is_complete or time.total is None else "at least "
    return bound + format_seconds(time.total)
