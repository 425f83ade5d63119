"""Plans for people and for programs: as tables in a terminal, and as JSON."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from graphtrain.planning.blame import flagged
from graphtrain.planning.tables import plan_as_json, plan_table
from graphtrain.planning.traffic import by_axes
from lowering.machine.target import Target
from sharding_rules.errors import ShardingError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from graphtrain.cost_model.assessment import Assessment, Memory
    from graphtrain.planning.answer import Answer
    from graphtrain.planning.blame import Cause
    from graphtrain.planning.diff import Change
    from graphtrain.planning.remedies import Remedy
    from graphtrain.planning.targets import Row
    from sharding_rules.plan import Plan

# What of a device's memory the compiler counts; of the rest it knows the sum alone.
_COUNTED = ("parameters", "frozen", "optimizer", "peak")
_PARTS = ("parameters", "frozen", "optimizer", "gradients", "activations", "temporaries", "peak")
_QUANTITIES = {
    "compile_seconds": "compile time",
    "step_seconds": "step time",
    "peak_bytes": "peak memory",
}

_FLAGS = 8  # in words, in the terminal
_NO_SPEEDS = (
    "no speed of this machine's memory and links is known, so the time of a step is that of its "
    "matrix products alone, at best"
)
_NO_REMEDY = (
    "no change of remat, microbatches, optimizer or mesh, nor up to four times the devices, was "
    "found to fit; graphtrain plan search tries every strategy"
)


def matching(plan: "Plan", pattern: str) -> list[str]:
    """Paths of the arrays that a pattern names.

    Raises:
        ShardingError: there are none.
    """
    paths = [path for path in plan.layouts if fnmatch(path, pattern)]
    if not paths:
        raise ShardingError(f"no array matches {pattern!r}; an example: {next(iter(plan.layouts))}")
    return paths


def print_answer(console: "Console", answer: "Answer") -> None:
    """Everything, as `graphtrain plan` shows it; optimizer state rests where its parameters do."""
    program, assessment = answer.program, answer.assessment
    plan, fits = assessment.plan, assessment.memory.fits
    shown = [p for p, layout in plan.layouts.items() if layout.spec.role != "optimizer"]
    for block in (
        f"{program.target}: mesh {plan.mesh}, rules {', '.join(program.rules)}",
        plan_table(plan, shown),
        memory_table(assessment.memory, program.target),
        *_chunk_line(assessment),
        collectives_table(assessment) if assessment.collectives else "no collectives",
        *_frozen_line(plan),
        *_flags(answer.causes),
        time_table(assessment),
    ):
        console.print(block, soft_wrap=isinstance(block, str))
        console.print()
    for line in _error_bars(answer):
        console.print(line, soft_wrap=True)
    if not Target.parse(program.target).about:
        console.print(_NO_SPEEDS, soft_wrap=True)
    if assessment.remark:
        console.print(f"remark: {assessment.remark}", soft_wrap=True)
    console.print(verdict(assessment))
    if not fits:
        console.print()
        console.print(remedies_table(answer.remedies) if answer.remedies else _NO_REMEDY)


def _frozen_line(plan: "Plan") -> list[str]:
    """How many weights are trained, where some are not."""
    from graphtrain.models.lora.trainable import weight_count

    trained, frozen = (
        weight_count(
            {path: one.spec for path, one in plan.layouts.items() if one.spec.role == role}
        )
        for role in ("parameter", "frozen")
    )
    if not frozen:
        return []
    return [
        f"{trained:,} weights are trained; {frozen:,} are frozen, without gradients or "
        "optimizer state"
    ]


def _chunk_line(assessment: "Assessment") -> list[str]:
    """For how much of a sequence logits exist, where that is not all of it."""
    if assessment.chunk is None:
        return []
    return [f"logits exist for {assessment.chunk:,} positions of a sequence at a time"]


def _flags(causes: "Sequence[Cause]") -> list[str]:
    """What no strategy explains, in words."""
    found = flagged(causes)
    if not found:
        return []
    lines = [f"no strategy explains {len(found)} of {len(causes)} collectives:"]
    lines += [f"- {cause.sentence}" for cause in found[:_FLAGS]]
    if len(found) > _FLAGS:
        lines.append(f"- and {len(found) - _FLAGS} smaller ones: --blame lists every collective")
    return ["\n".join(lines)]


def blame_lines(causes: "Sequence[Cause]") -> str:
    """Why every collective is there, a line for each; what no strategy explains is marked."""
    return "\n".join(f"{'  ' if cause.explained else '! '}{cause.sentence}" for cause in causes)


def verdict(assessment: "Assessment") -> str:
    """Whether it fits, in a sentence."""
    memory = assessment.memory
    if memory.refused:
        return f"does not fit {assessment.target}, says the compiler"
    said = "the compiler" if memory.source == "compiler" else "an estimate"
    share = f"{_mega(memory.peak)} of {_mega(memory.capacity)} MB, says {said}"
    if memory.fits:
        return f"fits {assessment.target}: {share}"
    over = _mega(memory.peak - memory.capacity)
    return f"does not fit {assessment.target}: {share}; {over} MB too many"


def _error_bars(answer: "Answer") -> list[str]:
    """How far earlier predictions for this target were off."""
    bars, target = answer.error_bars, answer.assessment.target
    if not bars:
        return [f"error bar: none yet; every graphtrain run on {target} adds to it"]
    return [
        f"error bar: {_QUANTITIES[name]} was {bar.median:.2f} x the predicted (median), "
        f"{bar.worst:.2f} x at worst; runs on {target}: {bar.count}"
        for name, bar in bars.items()
    ]


def remedies_table(remedies: "Sequence[Remedy]") -> "Table":
    """Changes that would fit, cheapest first."""
    table = _table("what would fit", ">peak MB", ">step s", ">device-seconds", "says")
    for remedy in remedies:
        peak, total = remedy.assessment.memory.peak, remedy.assessment.time.total
        change = " ".join(f"--set {shlex.quote(one)}" for one in remedy.change)
        figures = _mega(peak), seconds(total), seconds(remedy.device_seconds)
        table.add_row(change, *figures, "compiler" if remedy.confirmed else "estimate")
    return table


def targets_table(rows: "Sequence[Row]") -> "Table":
    """A line for each machine."""
    table = _table(
        "target", "mesh", "says", "fits", ">peak MB", ">of MB", ">step s", ">MFU", ">compile s"
    )
    for row in rows:
        of = row.assessment
        if of is None:
            table.add_row(row.target, "", "cannot")
            continue
        memory, spent = of.memory, of.compile_seconds
        sizes = _mega(memory.peak), _mega(memory.capacity), seconds(of.time.total), f"{of.mfu:.1%}"
        fits = "yes" if memory.fits else "no: refused" if memory.refused else "no"
        compiled = "-" if spent is None else f"{spent:.1f}"
        table.add_row(row.target, str(of.plan.mesh), memory.source, fits, *sizes, compiled)
    return table


def changes_table(changes: "Sequence[Change]") -> "Table":
    """What differs, before and after."""
    table = _table("kind", "what", ">before", ">after", ">after/before")
    for change in changes:
        values = (_value(value, change.unit) for value in (change.before, change.after))
        ratio = "" if change.ratio is None else f"{change.ratio:.3g}"
        table.add_row(change.kind, change.what, *values, ratio)
    return table


def _value(value: str | float | None, unit: str) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    if unit == "bytes":
        return f"{_mega(value)} MB"
    return f"{value:,}" if unit == "a step" else f"{seconds(value)} {unit}".strip()


def target_rows(rows: "Sequence[Row]") -> list[dict[str, Any]]:
    """The rows of targets_table for programs, each with all that is known."""
    return [
        {"target": row.target, "error": row.error}
        if row.assessment is None
        else assessment_as_json(row.assessment)
        for row in rows
    ]


def answer_as_json(answer: "Answer") -> dict[str, Any]:
    """An answer for programs."""
    remedies = [
        {
            "change": list(remedy.change),
            "confirmed": remedy.confirmed,
            "peak_bytes": remedy.assessment.memory.peak,
            "step_seconds": remedy.assessment.time.total,
            "device_seconds": remedy.device_seconds,
        }
        for remedy in answer.remedies
    ]
    bars = {name: asdict(bar) for name, bar in answer.error_bars.items()}
    about = assessment_as_json(answer.assessment) | {"error_bars": bars, "remedies": remedies}
    for row, cause in zip(about["collectives"], answer.causes, strict=False):
        row |= {"why": cause.sentence, "rule": cause.rule, "explained": cause.explained}
    return about


def memory_table(memory: "Memory", target: str) -> "Table":
    """Bytes of one device by kind, each with who says so."""
    table = _table("memory of one device", ">MB", ">of device", "says")
    for part, source in memory_sources(memory).items():
        size = getattr(memory, part)
        if part == "frozen" and not size:
            continue  # all weights are trained
        table.add_row(part, _mega(size), f"{size / memory.capacity:.1%}", source)
    source = "this machine" if Target.parse(target).platform == "cpu" else "datasheet"
    table.add_row("device", _mega(memory.capacity), "", source)
    return table


def memory_sources(memory: "Memory") -> dict[str, str]:
    """Who says how large each part is."""
    if memory.source == "estimate":
        return dict.fromkeys(_PARTS, "estimate")
    sources = {part: "compiler" if part in _COUNTED else "estimate" for part in _PARTS}
    return sources | {"temporaries": "the compiler's peak less the above"}


def collectives_table(assessment: "Assessment") -> "Table":
    """What a device sends in a step, by mesh axes and operation."""
    table = _table("over", "collective", ">a step", ">MB handled", ">MB sent", "says")
    for row in by_axes(assessment.collectives):
        counts = f"{row.count:,}", _mega(row.bytes), _mega(row.wire_bytes)
        table.add_row(row.axes, row.op, *counts, assessment.collectives_source)
    return table


def time_table(assessment: "Assessment") -> "Table":
    """Seconds of a step by roofline; which of compute and memory counts is marked."""
    table, time = _table("time of a step", ">seconds", "says"), assessment.time
    limit = "memory" if time.memory > time.compute else "compute"
    for name in ("compute", "memory"):
        told = "estimate" if name == limit else f"estimate; behind {limit}"
        table.add_row(name, seconds(getattr(time, name)), told)
    traffic = assessment.collectives_source
    for axes, spent in time.communication.items():
        table.add_row(f"sending over {axes}", seconds(spent), f"estimate, traffic: {traffic}")
    if time.communication:
        table.add_row("hidden behind compute", f"-{seconds(time.overlapped)}", "estimate")
    table.add_row("pipeline bubble", seconds(time.bubble), "estimate")
    table.add_row("step", seconds(time.total), "estimate")
    table.add_row("model FLOP utilisation", f"{assessment.mfu:.1%}", "estimate")
    table.add_row("with causal attention in half", f"{assessment.mfu_causal:.1%}", "estimate")
    return table


def assessment_as_json(assessment: "Assessment") -> dict[str, Any]:
    """All that is known of a program on a target, for programs; units are in the names."""
    plan, memory, time = assessment.plan, assessment.memory, assessment.time
    parts = {f"{name}_bytes": getattr(memory, name) for name in (*_PARTS, "capacity")}
    return {
        "target": assessment.target,
        "devices": plan.mesh.devices,
        "mesh": dict(plan.mesh.axes),
        "memory": parts | {"source": memory.source},
        "chunk": assessment.chunk,
        "collectives": [
            asdict(one) | {"wire_bytes_per_step": round(one.wire_bytes_per_step)}
            for one in assessment.collectives
        ],
        "step_seconds": time.total,
        "step_seconds_by_part": {
            "compute": time.compute,
            "memory": time.memory,
            "communication": dict(time.communication),
            "overlapped": time.overlapped,
            "bubble": time.bubble,
        },
        "mfu": assessment.mfu,
        "mfu_causal": assessment.mfu_causal,
        "fits": memory.fits,
        "compile_seconds": assessment.compile_seconds,
        "remark": assessment.remark,
        "sources": {
            "memory": memory_sources(memory),
            "collectives": assessment.collectives_source,
            "step_seconds": "estimate",
            "mfu": "estimate",
            "mfu_causal": "estimate",
            "arrays": "rules",
        },
        "arrays": plan_as_json(plan),
    }


def _table(*columns: str) -> "Table":
    """An open table; a column whose name begins with ">" is aligned to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in columns:
        justify = "right" if name.startswith(">") else "left"
        table.add_column(name.removeprefix(">"), justify=justify, no_wrap=True)
    return table


def _mega(count: float) -> str:
    return f"{count / 1e6:,.1f}"


def seconds(value: float) -> str:
    """Three digits that count, whatever the magnitude."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
