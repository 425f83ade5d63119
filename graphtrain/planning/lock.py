"""Lock file: a plan as text under version control, to compare later plans with.

The comparison covers placement, memory and communication, which changes of code, settings or
toolchain can affect. The toolchain is only a comment: a new version without effect is accepted.
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
from sharding_rules.documents import DocumentError, read_text

_SUFFIX = ".plan"
REWRITE = "graphtrain plan lock CONFIG"


def lock_path(config: Path) -> Path:
    """Return the default path of the lock file of a configuration."""
    return config.with_suffix(_SUFFIX)


def read_lock(path: Path, rewrite: str = REWRITE) -> str:
    """Return the text of a lock file.

    Args:
        path: The lock file.
        rewrite: Command that writes it, for the error message.

    Raises:
        PlanError: the file does not exist, or is not text.
    """
    try:
        return read_text(path)
    except FileNotFoundError:
        raise PlanError(f"{path}: no such file; write it with: {rewrite}") from None
    except (OSError, DocumentError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise PlanError(f"{path}: cannot be read as a lock: {reason}") from None


LOCK_MARK = "[collectives]  # over mesh axes"  # in every lock


def lock_text(assessment: Assessment) -> str:
    """Return the text of the lock file of an assessment; equal plans have equal text."""
    return "\n".join([*_toolchain(assessment), *_body(assessment)]) + "\n"


def lock_diff(locked: str, assessment: Assessment, rewrite: str = REWRITE) -> list[str]:
    """Compare a lock with an assessment; return the lines of a diff, empty if they agree.

    Args:
        locked: Text of the lock.
        assessment: The current assessment.
        rewrite: Command that writes the lock, for the error message.

    Raises:
        PlanError: the lock is damaged, or one of them is from the compiler and the other is an
            estimate.
    """
    now = lock_text(assessment)
    before, after = list(_significant_lines(locked)), list(_significant_lines(now))
    if before == after:
        return []
    is_whole = any(line.startswith("[collectives]") for line in before)
    if not is_whole or _source(before) not in ("compiler", "estimate"):
        raise PlanError(
            "the lock is damaged: its [memory] or [collectives] section is missing; restore it "
            f"from version control, or write it again: {rewrite}"
        )
    sources = _source(before), _source(after)
    if sources[0] != sources[1]:
        reason = assessment.note or "use --no-compile for both or neither, or rewrite the lock"
        raise PlanError(
            f"the lock is from the {sources[0]} and this plan is from the {sources[1]}, so they "
            f"cannot be compared; {reason}"
        )
    lines = difflib.unified_diff(before, after, "locked", "now", lineterm="", n=0)
    toolchain = difflib.unified_diff(
        _toolchain_lines(locked), _toolchain_lines(now), lineterm="", n=0
    )
    return [line for line in [*lines, *list(toolchain)[2:]] if not line.startswith("@@")]


def _toolchain(assessment: Assessment) -> Iterator[str]:
    tools = Toolchain.current(Target.parse(assessment.target).platform)
    yield "# Lock of a plan. Compare: graphtrain plan check. Rewrite: graphtrain plan lock."
    yield "# made with " + ", ".join(
        f"{name} {version}" for name, version in tools.versions.items()
    )
    yield from (f"# made with {name}={value}" for name, value in tools.environment.items())


def _body(assessment: Assessment) -> Iterator[str]:
    plan, memory = assessment.plan, assessment.memory
    mesh = " ".join(f"{name}={size}" for name, size in plan.mesh.axes.items() if size > 1)
    yield from ["", f"target  {assessment.target}", f"mesh    {mesh or '1 device'}"]
    yield from ["", "[arrays]  # dtype, shape with the mesh axes that split it, bytes per device"]
    arrays = ((path, placement(plan, path), f"{plan.shard_bytes(path)}") for path in plan.layouts)
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
    heading = f"executions in a step x bytes, from the {assessment.collectives_source}"
    yield from ["", f"{LOCK_MARK}, operation, {heading}"]
    yield from _aligned(_collectives(assessment))


_ESTIMATED = ("gradients", "activations", "temporaries", "peak")


def _collectives(assessment: Assessment) -> Iterator[tuple[str, ...]]:
    """Yield one row for each size, without source lines, which change with every edit."""
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


def _significant_lines(text: str) -> Iterator[str]:
    """Yield the lines to compare: without comments and blank lines, with normalized spaces."""
    for line in text.splitlines():
        if not line.startswith("#") and line.strip():
            yield "  ".join(line.split())


def _toolchain_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("# made with")]


def _source(lines: Iterable[str]) -> str:
    """Return the source of a lock, "compiler" or "estimate", from its [memory] line."""
    memory = next((line for line in lines if line.startswith("[memory]")), "unknown")
    return memory.rpartition(" ")[2]
