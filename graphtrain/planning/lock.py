"""The lock: a plan as text to keep in git, and to compare a later plan with.

What is compared is what a change of code, settings or toolchain can do to a run: placement, memory
and communication. The toolchain itself is a comment: another version that changes nothing is fine.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from graphtrain.cost_model.assessment import Assessment
from graphtrain.errors import PlanError
from graphtrain.planning.diff import placement
from lowering.machine.target import Target
from lowering.machine.toolchain import Toolchain

_SUFFIX = ".plan"


def lock_path(config: Path) -> Path:
    """Where the lock of a configuration is, unless the user says otherwise."""
    return config.with_suffix(_SUFFIX)


def lock_text(assessment: Assessment) -> str:
    """The lock of an assessment; equal plans give equal text."""
    return "\n".join([*_toolchain(assessment), *_body(assessment)]) + "\n"


def changes(locked: str, assessment: Assessment) -> list[str]:
    """What a lock says and the assessment does not, as lines of a diff; none if they agree.

    Raises:
        PlanError: one of them is from the compiler and the other an estimate.
    """
    now = lock_text(assessment)
    before, after = list(_compared(locked)), list(_compared(now))
    if before == after:
        return []
    asked = _source(before), _source(after)
    if asked[0] != asked[1]:
        reason = assessment.remark or "ask the same of both, or write the lock anew"
        raise PlanError(
            f"the lock is from the {asked[0]} and this plan from the {asked[1]}, so they cannot "
            f"be compared; {reason}"
        )
    lines = difflib.unified_diff(before, after, "locked", "now", lineterm="", n=0)
    toolchain = difflib.unified_diff(_made_with(locked), _made_with(now), lineterm="", n=0)
    return [line for line in [*lines, *list(toolchain)[2:]] if not line.startswith("@@")]


def _toolchain(assessment: Assessment) -> Iterator[str]:
    tools = Toolchain.here(Target.parse(assessment.target).platform)
    yield "# A plan: graphtrain plan check compares with it, graphtrain plan lock rewrites it."
    yield "# made with " + ", ".join(
        f"{name} {version}" for name, version in tools.versions.items()
    )
    yield from (f"# made with {name}={value}" for name, value in tools.environment.items())


def _body(assessment: Assessment) -> Iterator[str]:
    plan, memory = assessment.plan, assessment.memory
    mesh = " ".join(f"{name}={size}" for name, size in plan.mesh.axes.items() if size > 1)
    yield from ["", f"target  {assessment.target}", f"mesh    {mesh or '1 device'}"]
    yield from ["", "[arrays]  # dtype, shape with the mesh axes that split it, bytes per device"]
    arrays = ((path, placement(plan, path), f"{plan.bytes_of(path)}") for path in plan.layouts)
    yield from _aligned(arrays)
    yield from ["", f"[memory]  # bytes of one device, from the {memory.source}"]
    frozen = ["frozen"] if memory.frozen else []
    kinds = [
        "parameters",
        *frozen,
        "optimizer",
        *(["peak"] if memory.source == "compiler" else _ESTIMATED),
    ]
    yield from _aligned((kind, str(getattr(memory, kind))) for kind in kinds)
    about = f"executions in a step x bytes, from the {assessment.collectives_source}"
    yield from ["", f"[collectives]  # over mesh axes, operation, {about}"]
    yield from _aligned(_collectives(assessment))


_ESTIMATED = ("gradients", "activations", "temporaries", "peak")


def _collectives(assessment: Assessment) -> Iterator[tuple[str, ...]]:
    """One row for each size; the lines of code they come from move with every edit."""
    rows: Counter[tuple[str, str, int, str]] = Counter()
    for one in assessment.collectives:
        rows["+".join(one.axes), one.op, one.bytes, one.dtype] += one.count
    for (axes, op, size, dtype), count in sorted(rows.items()):
        yield axes, op, f"{count} x {size}", dtype


def _aligned(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip()


def _compared(text: str) -> Iterator[str]:
    """The lines that count, whatever the blanks in them."""
    for line in text.splitlines():
        if not line.startswith("#") and line.strip():
            yield "  ".join(line.split())


def _made_with(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("# made with")]


def _source(lines: Iterable[str]) -> str:
    """Who made a lock: the compiler, or an estimate."""
    memory = next((line for line in lines if line.startswith("[memory]")), "unknown")
    return memory.rpartition(" ")[2]
