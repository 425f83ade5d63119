"""Output of the plan of serving: tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphtrain.planning.formats import UNKNOWN, format_seconds
from graphtrain.planning.tables import empty_table, megabytes
from graphtrain.planning.traffic_by_axes import sum_by_axes
from lowering.machine import gpu_memory

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from graphtrain.cost_model.served_sizes import ServedSizes
    from graphtrain.cost_model.serving_assessment import Limit, ServingAssessment, Speed


def print_serving(console: Console, assessment: ServingAssessment) -> None:
    """Print the complete output of `graphtrain plan --for serve`."""
    for block in (
        _heading(assessment),
        memory_table(assessment),
        programs_table(assessment),
        _limits(assessment),
        speeds_table(assessment),
        _collectives(assessment),
    ):
        console.print(block, soft_wrap=isinstance(block, str))
        console.print()
    if assessment.note:
        console.print(f"note: {assessment.note}", soft_wrap=True)
    for finding in assessment.findings:
        console.print(f"finding: {finding}", soft_wrap=True)
    console.print(fit_summary(assessment))


def fit_summary(assessment: ServingAssessment) -> str:
    """Return one sentence that says whether the programs fit in device memory."""
    memory = assessment.memory
    share = f"peak {megabytes(memory.peak)} of {megabytes(memory.capacity)} MB"
    if memory.fits:
        return f"fits {assessment.target}: {share}"
    if memory.peak <= memory.capacity:
        return f"does not fit {assessment.target}: the compiler found no way to fit it"
    excess = megabytes(memory.peak - memory.capacity)
    return f"does not fit {assessment.target}: {share}, {excess} MB too much"


def memory_table(assessment: ServingAssessment) -> Table:
    """Return the table of one device's memory by kind, with the source of each number."""
    memory, target = assessment.memory, assessment.model.program.target
    table = empty_table("memory per device", ">MB", ">of usable", "source")

    def add(name: str, size: int, source: str) -> None:
        table.add_row(name, megabytes(size), f"{size / memory.capacity:.1%}", source)

    add("weights", memory.weights, "rules")
    if adapters := assessment.model.adapter_bytes:
        add("of these, LoRA adapters", adapters, "rules")
    add("KV cache", memory.kv_cache, "rules")
    add("state of sampling", memory.sampling, "rules")
    largest = memory.largest
    add(f"temporaries of {largest.graph}", largest.temporaries, largest.source)
    add("peak while serving", memory.resident + largest.temporaries, largest.source)
    add("peak while loading", memory.loading, memory.loading_source)
    if memory.capacity < target.memory_bytes:
        share = f"{memory.capacity / target.memory_bytes:.0%} of the device"
        table.add_row("usable", megabytes(memory.capacity), "", f"{share}: {gpu_memory.VARIABLE}")
    table.add_row("device", megabytes(target.memory_bytes), "", target.numbers_source)
    return table


def programs_table(assessment: ServingAssessment) -> Table:
    """Return the table of the programs: what they hold beside weights and state, and their peak."""
    table = empty_table("program", ">temporaries MB", ">peak MB", "source")
    memory = assessment.memory
    for one in memory.programs:
        sizes = one.temporaries, memory.resident + one.temporaries
        table.add_row(one.graph, *map(megabytes, sizes), one.source)
    return table


def speeds_table(assessment: ServingAssessment) -> Table:
    """Return the table of speeds by roofline; the larger of compute and memory counts."""
    table = empty_table(
        "roofline", ">compute ms", ">memory ms", ">communication ms", ">tokens/s at most"
    )
    for speed in assessment.speeds:
        parts = speed.compute, speed.memory, _communication(speed)
        rate = speed.tokens_per_second
        shown = UNKNOWN if rate is None else f"{rate:,.0f}"
        table.add_row(speed.what, *map(_milliseconds, parts), shown)
    return table


def _communication(speed: Speed) -> float | None:
    """Return the seconds of communication; None if a part is unknown."""
    known = [seconds for seconds in speed.communication.values() if seconds is not None]
    return sum(known) if speed.is_complete else None


def _milliseconds(seconds: float | None) -> str:
    return format_seconds(None if seconds is None else 1000 * seconds)


def _heading(assessment: ServingAssessment) -> str:
    model = assessment.model
    rules = ", ".join(model.program.settings.rules)
    return (
        f"{assessment.target}: mesh {model.mesh}, rules {rules}\n"
        f"slots {model.slots}, context {model.context:,} tokens "
        f"({_positions(model)}), {model.program.model.dtype}\n"
        f"KV cache per device: {model.kv_bytes_per_token:,} bytes for a token, "
        f"{model.kv_bytes_per_slot:,} for a slot"
    )


def _positions(model: ServedSizes) -> str:
    """Return the positions of the KV cache, by the number of layers where they differ."""
    longest, *others = model.layers_by_positions.items()
    if not others:
        return f"{longest[0]:,} positions in the KV cache"
    parts = [f"{positions:,} in {layers} layers" for positions, layers in (longest, *others)]
    return f"positions in the KV cache: {', '.join(parts)}"


def _limits(assessment: ServingAssessment) -> str:
    model, slots, context = assessment.model, assessment.slots, assessment.context
    return (
        f"largest number of slots with a context of {model.context:,}: "
        f"{_value(slots)}\n"
        f"longest context with {model.slots} slots: {_value(context)}"
    )


def _value(limit: Limit) -> str:
    if not limit.value:
        return f"none fits ({limit.source})"
    why = {"memory": "", "model": ", all positions of the model", "search": ", or more"}
    return f"{limit.value:,}{why[limit.limited_by]} ({limit.source})"


def _collectives(assessment: ServingAssessment) -> Table | str:
    if not assessment.collectives:
        return "no collectives in a step of decode"
    table = empty_table("mesh axes", "collective of decode", ">per step", ">MB sent", "source")
    for row in sum_by_axes(assessment.collectives):
        sizes = f"{row.count:,}", megabytes(row.wire_bytes)
        table.add_row(row.axes, row.op, *sizes, assessment.collectives_source)
    return table
