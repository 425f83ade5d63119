"""graphtrain compare: find the first difference between two dumps."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphtrain.cli.options import FiniteRange, LocalPath, json_option
from graphtrain.cli.terminal import say
from graphtrain.files import counted

if TYPE_CHECKING:
    from graphtrain.run.dumps.compare import ArrayDifference, Comparison

_DIFFERS = 5  # exit status, also if something was not compared
_MAX_ROWS = 20  # of arrays that differ, unless --all is given


@click.command("compare")
@click.argument("a", type=LocalPath(exists=True, file_okay=False))
@click.argument("b", type=LocalPath(exists=True, file_okay=False))
@click.option(
    "--tolerance",
    type=FiniteRange(min=0),
    help="Relative difference up to which arrays count as equal. [default: 1e-4 for float32, 1e-2 "
    "for float16 and 5e-2 for bfloat16, the coarser of both]",
)
@click.option(
    "--absolute",
    type=FiniteRange(min=0),
    default=0.0,
    show_default=True,
    help="Differences of at most this count as equal in any case, for arrays that are zero but "
    "for rounding.",
)
@click.option(
    "--common",
    is_flag=True,
    help="Compare only the arrays and steps that both have; otherwise dumps of which one has more "
    "are not equal.",
)
@click.option("--all", "shows_all", is_flag=True, help="Print a row for every array.")
@json_option
def command(
    a: Path,
    b: Path,
    tolerance: float | None,
    absolute: float,
    common: bool,
    shows_all: bool,
    as_json: bool,
) -> None:
    """Find the first array, in the order of execution, in which two dumps differ.

    A is the dump to trust, and B the other. Exits with 5 if they differ by more than the
    tolerance, or if something was not compared: arrays that are not finite in both, and those that
    only one has.
    """
    from graphtrain.api.dumps import compare

    comparison = compare(a, b, tolerance=tolerance, absolute=absolute, common=common)
    if as_json:
        click.echo(json.dumps(comparison.as_json()))
    else:
        _print(comparison, shows_all=shows_all)
    if not comparison.is_equal:
        sys.exit(_DIFFERS)


def _print(comparison: "Comparison", *, shows_all: bool) -> None:
    for note in comparison.notes:
        say(f"note: {note}")
    for letter, names in zip("AB", comparison.only_in, strict=True):
        if names:
            more = ", ..." if len(names) > 3 else ""
            say(f"note: only in {letter}: {', '.join(names[:3])}{more} ({len(names)})")
    first, total = comparison.first, len(comparison.differences)
    differing = [one for one in comparison.differences if one.differs]
    left_out = _left_out(comparison)
    if first is None:
        click.echo(_result(comparison, left_out))
    else:
        click.echo("\n".join(_first_lines(comparison, first)))
        click.echo(f"\n{'; '.join([f'{len(differing)} of {total} arrays differ', *left_out])}:")
    rows = list(comparison.differences) if shows_all else differing
    _print_table(rows if shows_all else rows[:_MAX_ROWS])
    if not shows_all and len(rows) > _MAX_ROWS:
        click.echo(f"... {len(rows) - _MAX_ROWS} more; --all prints every array")


def _result(comparison: "Comparison", left_out: Sequence[str]) -> str:
    """Return the line about two dumps without a difference."""
    equal = [one for one in comparison.differences if one.equal]
    text = f"{counted(len(equal), 'array')}, within {comparison.tolerance:g}"
    if equal:
        largest = max(equal, key=lambda one: one.relative)
        text += (
            f"; the largest difference is {largest.relative:.1e}, of {largest.name} in step "
            f"{largest.step}"
        )
    if comparison.is_equal:
        return "; ".join([f"equal: {text}", *left_out])
    return f"not all compared: {'; '.join(left_out)}; equal: {text}"


def _left_out(comparison: "Comparison") -> list[str]:
    """Return what was not compared, in words."""
    parts = []
    if found := comparison.not_finite:
        have = "is" if len(found) == 1 else "are"
        parts.append(
            f"{counted(len(found), 'array')} {have} not finite in both, the first of them "
            f"{found[0].name} in step {found[0].step}"
        )
    for noun, lists in (("array", comparison.only_in), ("step", comparison.only_steps)):
        for letter, names in zip("AB", lists, strict=True):
            if names:
                parts.append(f"{counted(len(names), noun)} only in {letter}")
    if any((*comparison.only_in, *comparison.only_steps)):
        parts[-1] += " (left out)" if comparison.common else " (--common leaves them out)"
    return parts


def _first_lines(comparison: "Comparison", first: "ArrayDifference") -> list[str]:
    """Return the lines about the first difference."""
    before = comparison.differences[: comparison.differences.index(first)]
    equal = counted(sum(one.equal for one in before), "equal array")
    not_finite = len([one for one in before if not one.equal])
    apart = f" and {not_finite} not finite in both" if not_finite else ""
    lines = [
        f"first difference: {first.name} in step {first.step}, after {equal}{apart}",
        f"  relative    {first.relative:.2e} (tolerance {comparison.tolerance:g})",
        f"  max |A - B| {first.max_abs:.2e}",
    ]
    if first.values is not None:
        place = "norms" if first.index is None else f"at {first.index}"
        lines.append(f"  {place:<11} {first.values[0]:.6g} in A, {first.values[1]:.6g} in B")
    if first.cosine is not None:
        lines.append(f"  cosine      {first.cosine:.6f}")
    if first.reason:
        lines.append(f"  differ in   {first.reason}")
    for number, line in enumerate(_by_file(first.lines)):
        lines.append(f"  {'' if number else _maker(first.name):<11} {line}")
    if first.after is not None:
        state = "equal" if before[-1].equal else "not finite in both"
        lines.append(f"  the array before it, {first.after}, is {state}")
    return lines


def _maker(name: str) -> str:
    """Return how the lines of an array made it."""
    return "gradient of" if name.startswith("backward/") else "made by"


def _by_file(lines: Sequence[str]) -> list[str]:
    """Return lines of code as "model.py:3, 7", one for each file."""
    numbers: dict[str, list[str]] = {}
    for line in lines:
        file, _, number = line.rpartition(":")
        numbers.setdefault(file, []).append(number)
    return [f"{file}:{', '.join(sorted(found, key=int))}" for file, found in numbers.items()]


def _print_table(rows: "list[ArrayDifference]") -> None:
    if not rows:
        return
    width = max(len(one.name) for one in rows)
    click.echo(f"{'step':>6}  {'array':<{width}}  {'relative':>9}  {'max |A-B|':>9}  {'cosine':>9}")
    for one in rows:
        cosine = "" if one.cosine is None else f"{one.cosine:9.6f}"
        values = f"{one.relative:9.1e}  {one.max_abs:9.1e}  {cosine:>9}"
        if one.not_finite and not one.differs:
            values = "not finite in both"
        click.echo(f"{one.step:>6}  {one.name:<{width}}  {values}".rstrip())
