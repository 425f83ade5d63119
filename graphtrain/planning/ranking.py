"""Output of a search: tables for the terminal, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graphtrain.cache.sizes import format_size
from graphtrain.config.schema import Batch
from graphtrain.planning.candidate import Candidate
from graphtrain.planning.costs import Workload
from graphtrain.planning.search import SearchResult

if TYPE_CHECKING:
    from rich.table import Table

_TEXT_COLUMNS = "mesh", "zero", "sequence", "schedule", "micro", "remat"
_NUMBER_COLUMNS = "seconds", "MFU", "sent", "peak"


def as_json(
    search_result: SearchResult, ranked: Sequence[Candidate], workload: Workload
) -> dict[str, Any]:
    """Return the result of a search as JSON; the names contain the units."""
    return {
        "considered": search_result.considered,
        "search_seconds": round(search_result.seconds, 3),
        "strategies": [_row(candidate, workload) for candidate in ranked],
        "batches": [_row(candidate, workload) for candidate in search_result.batches],
        "lost": search_result.rejected,
    }


def _row(one: Candidate, workload: Workload) -> dict[str, Any]:
    return one.settings | {
        "step_seconds": None if one.time is None else one.time.total,
        "step_seconds_is_lower_bound": one.is_lower_bound,
        "mfu": one.mfu,
        "equal": one.equal,
        "sent_bytes": one.sent_bytes,
        "peak_bytes": one.memory.peak,
        "capacity_bytes": one.memory.capacity,
        "source": one.memory.source,
        "fits": one.fits,
        "estimated": None if one.estimated is None else _figures(one.estimated),
        "note": one.note,
        "cost": workload.as_json(one.cost(workload)),
    }


def _figures(one: Candidate) -> dict[str, Any]:
    return {
        "step_seconds": None if one.time is None else one.time.total,
        "sent_bytes": one.sent_bytes,
        "peak_bytes": one.memory.peak,
    }


def batch_range(search_result: SearchResult, configured: Batch) -> str:
    """Return the global batch times seq_len: "32 x 2048", or "32 to 64 x 2048" of a search."""
    sizes = [one.program.batch.global_batch_size for one in search_result.batches]
    least, most = min(sizes, default=0), max(sizes, default=0)
    size = f"{least} to {most}" if least < most else str(configured.global_batch_size)
    return f"{size} x {configured.seq_len}"


def speeds_note(ranked: Sequence[Candidate]) -> str:
    """Return at which speeds of this machine times are estimated, or why not; empty if of others.

    Estimates of one search have the same source. Times without a part rank by what is known.
    """
    times = (candidate.time for one in ranked if (candidate := one.estimated or one))
    time = next((one for one in times if one is not None), None)
    if any(one.is_lower_bound for one in ranked):
        bounds = "times are lower bounds, by which the strategies are ranked: "
        reason = time.profile_note if time is not None else ""
        return bounds + (reason or "the machine's table lacks a bandwidth")
    if time is None or not (time.speeds or time.profile_note):
        return ""
    if time.speeds:
        return f"times of steps that were not compiled are estimates, speeds {time.speeds}"
    return f"times of steps that were not compiled are not from measurements: {time.profile_note}"


def reasons_heading(search_result: SearchResult) -> str:
    """Return the heading of the reasons, which compare steps of one global batch."""
    compared = ""
    if search_result.batches:
        batch = search_result.compared_batch
        best = next(one for one in search_result.batches if one.relative_batch == batch)
        compared = f", all with a global batch of {best.choice('batch')}"
    if search_result.compiled:
        compared += ", by estimates unless it says compiled"
    return f"why other strategies rank lower{compared}"


def table(ranked: Sequence[Candidate], workload: Workload, *, several: bool = False) -> Table:
    """Return a table with one row for each strategy.

    Args:
        ranked: the strategies.
        workload: the number of tokens to train on, and prices.
        several: whether several global batches were searched: a column says which a row has.
    """
    optional = ["batch"] * several
    optional += ["moments"] * any(one.program.optimizer.offload_to_host for one in ranked)
    costs = [name.removeprefix(">") for name in workload.columns]
    numbers = ("micro", "batch", *_NUMBER_COLUMNS, *costs)
    names = *_TEXT_COLUMNS, *optional, *_NUMBER_COLUMNS, *costs, "equal", "source"
    rows = [
        [
            str(candidate.mesh),
            *map(candidate.choice, ("zero", "sequence", "schedule")),
            str(candidate.program.batch.microbatches),
            candidate.choice("remat"),
            *map(candidate.choice, optional),
            *candidate.figures,
            *workload.cells(candidate.cost(workload)),
            f"{candidate.equal} more" if candidate.equal else "",
            _source(candidate),
        ]
        for candidate in ranked
    ]
    return _table(names, numbers, rows)


def _source(candidate: Candidate) -> str:
    if candidate.refused:
        return "refused"
    source = candidate.memory.source
    return source if candidate.memory.fits else f"{source}: does not fit"


def confirmations(ranked: Sequence[Candidate], *, several: bool = False) -> Table | None:
    """Return the estimates beside the compiler's numbers; None if nothing was compiled.

    Args:
        ranked: the strategies.
        several: whether several global batches were searched: a column says which a row has.
    """
    optional = ["batch"] * several
    rows = [
        [
            str(one.mesh),
            str(one.program.batch.microbatches),
            one.choice("remat"),
            *map(one.choice, optional),
            format_size(one.estimated.memory.peak),
            format_size(one.memory.peak),
            f"{one.estimated.memory.peak / one.memory.peak:.2f}",
            format_size(round(one.estimated.sent_bytes)),
            format_size(round(one.sent_bytes)),
            one.estimated.shown_seconds,
            one.shown_seconds,
        ]
        for one in ranked
        if one.estimated is not None
    ]
    texts = "mesh", "micro", "remat"
    numbers = (
        *optional, "peak: estimate", "compiler", "ratio", "sent: estimate", "compiler",
        "seconds: estimate", "by compiled program",
    )  # fmt: skip
    return _table((*texts, *numbers), ("micro", *numbers), rows) if rows else None


def batch_table(batches: Sequence[Candidate]) -> Table:
    """Return a table of the best strategy with each global batch; the times are estimates."""
    rows = [
        [
            one.choice("batch"),
            f"{one.program.batch.tokens:,}",
            *([str(one.mesh), *one.figures, _rate(one)] if one.fits else ["nothing fits"]),
        ]
        for one in batches
    ]
    numbers = "batch", "tokens", *_NUMBER_COLUMNS, "tokens/s"
    names = "batch", "tokens", "mesh", *_NUMBER_COLUMNS, "tokens/s"
    return _table(names, numbers, rows)


def batch_change(configured: Batch, chosen: Batch, steps: int) -> str:
    """Say what another global batch changes in a run of `steps` steps; empty if it is the same."""
    if chosen.global_batch_size == configured.global_batch_size:
        return ""
    before, after = configured.global_batch_size, chosen.global_batch_size
    equal_steps = steps * configured.tokens / chosen.tokens
    return (
        f"program.batch.global_batch_size = {after} in place of {before} is another training. The "
        "same: model, loss, seq_len and the order of the sequences. Changed: "
        f"run.steps = {steps:,} steps train {steps * chosen.tokens:,} tokens in place of "
        f"{steps * configured.tokens:,} ({equal_steps:,.0f} steps train as many), and learning "
        "rate, warm-up and decay keep their settings: choose them for the new batch"
    )


def _rate(candidate: Candidate) -> str:
    rate = candidate.tokens_per_second
    return "unknown" if rate is None else f"{float(f'{rate:.3g}'):,.0f}"


def _table(names: Sequence[str], numbers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table

    rich_table = Table(box=None, pad_edge=False)
    for name in names:
        rich_table.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
    for row in rows:
        rich_table.add_row(*row)
    return rich_table
