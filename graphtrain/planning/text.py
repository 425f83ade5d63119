"""Output of plans: tables for the terminal."""

import shlex
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from html import escape
from typing import TYPE_CHECKING

from graphtrain.compile.html import html_from_rich
from graphtrain.models.grouped_matmul_support import step_computes_all_experts
from graphtrain.planning.collective_origins import significant, unexplained
from graphtrain.planning.formats import format_seconds, format_share, machine_lines
from graphtrain.planning.measured_text import measured_table
from graphtrain.planning.memory_parts import memory_sources
from graphtrain.planning.quantized_products import products_line
from graphtrain.planning.tables import empty_table, megabytes, plan_table
from graphtrain.planning.traffic_by_axes import sum_by_axes
from lowering.machine import gpu_memory
from lowering.machine.target import machine_of
from sharding_rules.errors import ShardingError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from graphtrain.config.resolve import ResolvedProgram
    from graphtrain.cost_model.assessment import Assessment, Memory
    from graphtrain.planning.collective_origins import CollectiveOrigin
    from graphtrain.planning.diff import PlanChange
    from graphtrain.planning.ledger import ErrorBar
    from graphtrain.planning.parameters import ParameterCount
    from graphtrain.planning.remedies import Remedy
    from lowering.machine.target import Target
    from sharding_rules.plan import Plan

_QUANTITIES = {
    "compile_seconds": "compile time",
    "step_seconds": "step time",
    "peak_bytes": "peak memory",
}

_FLAGS = 8  # number of unexplained collectives to print in the terminal
_NO_REMEDY = (
    "no change of remat, microbatches, optimizer or mesh, and no target with up to four times the "
    "devices, was found to fit; run graphtrain plan search to try every strategy"
)


def matching_paths(plan: "Plan", pattern: str) -> list[str]:
    """Return the paths of the arrays that match a shell-style pattern.

    Raises:
        ShardingError: no array matches.
    """
    paths = [path for path in plan.layouts if fnmatch(path, pattern)]
    if not paths:
        raise ShardingError(
            f"no array matches {pattern!r}; an example of a path is {next(iter(plan.layouts))}"
        )
    return paths


def print_assessment(
    console: "Console",
    program: "ResolvedProgram",
    assessment: "Assessment",
    *,
    parameters: "ParameterCount",
    error_bars: "Mapping[str, ErrorBar]",
    remedies: "Sequence[Remedy]",
    causes: "Sequence[CollectiveOrigin]",
) -> None:
    """Print the complete output of `graphtrain plan`.

    Arrays of optimizer state are left out of the plan's table; they follow their parameters.
    """
    plan, fits = assessment.plan, assessment.memory.fits
    shown = [p for p, layout in plan.layouts.items() if layout.spec.role != "optimizer"]
    for block in (
        f"{program.settings.target}: mesh {plan.mesh}, rules {', '.join(program.settings.rules)}",
        *machine_lines(program.target),
        str(parameters),
        plan_table(plan, shown),
        memory_table(assessment.memory, program.target),
        *_chunk_line(assessment),
        *_experts_line(program),
        *products_line(program.settings.precision, assessment),
        collectives_table(assessment) if assessment.collectives else "no collectives",
        *_flags(causes),
        time_table(assessment),
    ):
        console.print(block, soft_wrap=isinstance(block, str))
        console.print()
    for line in _error_bars(error_bars, assessment.target):
        console.print(line, soft_wrap=True)
    if unknown := _unknown_parts(assessment):
        console.print(
            f"no speed is known for {' and '.join(unknown)} of {assessment.target}"
            + ("; the step time is a lower bound without them" if assessment.time.total else ""),
            soft_wrap=True,
        )
    if assessment.time.profile_note:
        console.print(
            f"the step time is not from measurements: {assessment.time.profile_note}",
            soft_wrap=True,
        )
    if assessment.note:
        console.print(f"note: {assessment.note}", soft_wrap=True)
    for finding in assessment.findings:
        console.print(f"finding: {finding}", soft_wrap=True)
    console.print(fit_summary(assessment))
    if not fits:
        console.print()
        console.print(remedies_table(remedies) if remedies else _NO_REMEDY)


def _unknown_parts(assessment: "Assessment") -> list[str]:
    """Return the parts of the step time that are unknown."""
    time = assessment.time
    parts = [name for name in ("compute", "memory") if getattr(time, name) is None]
    return parts + ["communication"] * (None in time.communication.values())


def _chunk_line(assessment: "Assessment") -> list[str]:
    """Return a line with the chunk size of the logits, if they are computed in chunks."""
    if assessment.chunk is None:
        return []
    return [f"logits are computed in chunks of {assessment.chunk:,} positions of a sequence"]


def _experts_line(program: "ResolvedProgram") -> list[str]:
    """Return a line that says how a native mixture's experts are computed, if there is one."""
    from graphtrain.config.schema import is_imported

    if is_imported(program.model) or program.model.moe is None:
        return []
    if (capacity := program.model.moe.capacity_factor) is not None:
        return [f"experts have a capacity of {capacity:g} x the mean, and drop choices beyond it"]
    if step_computes_all_experts(program):
        return ["experts are computed without drops, all of them for each token's choices"]
    return ["experts are computed without drops, only the chosen ones (grouped matrix product)"]


def _flags(causes: "Sequence[CollectiveOrigin]") -> list[str]:
    """Return a text block that lists the significant collectives that no strategy explains."""
    shown = significant(causes)
    if not shown:
        return []
    lines = [f"no strategy explains {len(shown)} of {len(causes)} collectives:"]
    lines += [f"- {cause.explanation}" for cause in shown[:_FLAGS]]
    if len(unexplained(causes)) > len(shown[:_FLAGS]):
        smaller = len(unexplained(causes)) - len(shown[:_FLAGS])
        lines.append(f"- and {smaller} smaller ones; --blame lists every collective")
    return ["\n".join(lines)]


def explanation_lines(causes: "Sequence[CollectiveOrigin]") -> str:
    """Return one line for each collective with its reason; unexplained ones are marked with "!"."""
    return "\n".join(f"{'  ' if cause.explained else '! '}{cause.explanation}" for cause in causes)


def fit_summary(assessment: "Assessment") -> str:
    """Return one sentence that says whether the program fits in device memory."""
    memory = assessment.memory
    if memory.compiler_out_of_memory:
        return f"does not fit {assessment.target}: the compiler found no way to fit it"
    source = "compiler" if memory.source == "compiler" else "estimate"
    share = f"peak {megabytes(memory.peak)} of {megabytes(memory.capacity)} MB (source: {source})"
    if memory.fits:
        return f"fits {assessment.target}: {share}"
    excess_megabytes = megabytes(memory.peak - memory.capacity)
    return f"does not fit {assessment.target}: {share}, {excess_megabytes} MB too much"


def _error_bars(bars: "Mapping[str, ErrorBar]", target: str) -> list[str]:
    """Return lines with the errors of earlier predictions for a target."""
    if not bars:
        return [f"error bar: none yet; each graphtrain run on {target} adds a measurement"]
    return [
        f"error bar: measured {_QUANTITIES[name]} was {bar.median:.2f} x the prediction (median), "
        f"{bar.worst:.2f} x in the worst case; runs on {target}: {bar.count}"
        for name, bar in bars.items()
    ]


def assessment_as_html(
    program: "ResolvedProgram", assessment: "Assessment", remedies: "Sequence[Remedy]"
) -> str:
    """Return the main tables of a plan for a notebook; the arrays are in assessment.plan."""
    tables = [memory_table(assessment.memory, program.target)]
    if assessment.collectives:
        tables.append(collectives_table(assessment))
    tables.append(time_table(assessment))
    if remedies:
        tables.append(remedies_table(remedies))
    summary = f"<p>{escape(fit_summary(assessment))}</p>"
    return summary + "".join(map(html_from_rich, tables))


def remedies_table(remedies: "Sequence[Remedy]") -> "Table":
    """Return the table of changes that would fit, cheapest first."""
    table = empty_table(
        "changes that would fit", ">peak MB", ">step s", ">device-seconds", "source"
    )
    for remedy in remedies:
        peak, total = remedy.assessment.memory.peak, remedy.assessment.time.total
        change = " ".join(f"--set {shlex.quote(one)}" for one in remedy.change)
        figures = megabytes(peak), format_seconds(total), format_seconds(remedy.device_seconds)
        table.add_row(change, *figures, "compiler" if remedy.confirmed else "estimate")
    return table


def changes_table(changes: "Sequence[PlanChange]") -> "Table":
    """Return the table of differences, with values before and after."""
    table = empty_table("kind", "what", ">before", ">after", ">after/before")
    for change in changes:
        values = (_value(value, change.unit) for value in (change.before, change.after))
        ratio = "" if change.ratio is None else f"{change.ratio:.3g}"
        table.add_row(change.kind, change.what, *values, ratio)
    return table


def _value(value: str | float | None, unit: str) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    if unit == "bytes":
        return f"{megabytes(value)} MB"
    return f"{value:,}" if unit == "a step" else f"{format_seconds(value)} {unit}".strip()


def memory_table(memory: "Memory", target: "Target") -> "Table":
    """Return the table of one device's memory by kind, with the source of each number."""
    table = empty_table("memory per device", ">MB", ">of usable", "source")
    for kind, source in memory_sources(memory).items():
        size = getattr(memory, kind)
        if kind == "frozen" and not size:
            continue  # there are no frozen weights
        table.add_row(kind, megabytes(size), f"{size / memory.capacity:.1%}", source)
    if memory.capacity < target.memory_bytes:
        share = f"{memory.capacity / target.memory_bytes:.0%} of the device"
        table.add_row("usable", megabytes(memory.capacity), "", f"{share}: {gpu_memory.VARIABLE}")
    table.add_row("device", megabytes(target.memory_bytes), "", target.numbers_source)
    if memory.host:
        table.add_row("host memory of this device", megabytes(memory.host), "", "estimate")
    return table


def collectives_table(assessment: "Assessment") -> "Table":
    """Return the table of a device's traffic in a step, by mesh axes and operation."""
    table = empty_table(
        "mesh axes", "collective", ">per step", ">MB unsharded", ">MB sent", "source"
    )
    for row in sum_by_axes(assessment.collectives):
        counts = f"{row.count:,}", megabytes(row.bytes), megabytes(row.wire_bytes)
        table.add_row(row.axes, row.op, *counts, assessment.collectives_source)
    return table


def time_table(assessment: "Assessment") -> "Table":
    """Return the table of a step's time."""
    table, time = empty_table("step time", ">seconds", "source"), assessment.time
    if time.measured is not None:
        return measured_table(time.measured)
    excess = assessment.flops_excess
    counted = "estimate"
    if excess is not None:  # below 1, the compiler's do not have those of kernels
        counted += ", FLOPs: compiler" if excess >= 1 else ", FLOPs: estimate"
    counted += f", {_share_of_peak(assessment)}"
    moved = f"estimate, speeds {time.speeds}" if time.speeds else "estimate"
    for name, source in (("compute", moved if time.speeds else counted), ("memory", moved)):
        if getattr(time, name) is None:
            source = "no speed is known for this machine"
        table.add_row(name, format_seconds(getattr(time, name)), source)
    traffic = assessment.collectives_source
    for axes, seconds in time.communication.items():
        source = "no speed is known for this machine"
        if seconds is not None:
            source = f"estimate, traffic: {traffic}"
        table.add_row(f"communication over {axes}", format_seconds(seconds), source)
    if time.overlapped:
        table.add_row("overlapped with compute", f"-{format_seconds(time.overlapped)}", "estimate")
    if time.bubble:
        table.add_row("pipeline bubble", format_seconds(time.bubble), "estimate")
    if time.host != 0.0:
        source = "estimate" if time.host else "no speed is known for this machine"
        table.add_row("transfers to host memory", format_seconds(time.host), source)
    bound = "" if time.is_complete or time.total is None else "lower bound: "
    table.add_row("step", format_seconds(time.total), f"{bound}estimate")
    if assessment.mfu is not None:  # of an incomplete time it would mean nothing
        name = "model FLOPs utilization (MFU)"
        table.add_row(name, format_share(assessment.mfu), "estimate")
    if assessment.mfu != assessment.mfu_causal:
        causal = format_share(assessment.mfu_causal)
        table.add_row("MFU, causal attention counted half", causal, "estimate")
    return table


def _share_of_peak(assessment: "Assessment") -> str:
    """Say what part of the peak the time of compute assumes, and where it is from."""
    if (achieved := assessment.time.achieved) is None:
        return "at peak FLOP/s, which no step reaches"
    own = achieved.machine == machine_of(assessment.target)
    narrow = "" if achieved.products_8bit is None else f", 8 bits {achieved.products_8bit:.0%}"
    shares = f"{achieved.products:.0%} of peak FLOP/s{narrow}, attention {achieved.attention:.0%}"
    if not achieved.machine:
        return f"at {shares}, which the file of targets gives"
    return f"at {shares}: as published steps{'' if own else f' on {achieved.machine}'}"
