"""Machines of the user, from a TOML file: new ones, and other numbers of known ones."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from lowering.errors import LoweringError
from sharding_rules.documents import DocumentError, read_toml

_NAME = re.compile(r"[a-z][a-z0-9._-]{0,39}", re.ASCII)
_REQUIRED = "platform", "memory", "flops", "source"  # of a machine that is based on no other
_STRICT = ConfigDict(extra="forbid", strict=True)

_Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, le=1_000_000)]
_Share = Annotated[float, Field(gt=0, le=1)]
_Overlap = Annotated[float, Field(ge=0, le=1)]
_Text = Annotated[str, Field(min_length=1, max_length=2000)]

# Unit of each number, and the least and the largest that a machine may have: from far less than an
# accelerator of today has to far more. Numbers in GB or TFLOP/s are outside.
_PLAUSIBLE = {
    "memory": ("bytes", 1e9, 1e14),
    "bandwidth": ("bytes per second", 1e9, 1e15),
    "flops": ("FLOP/s", 1e11, 1e17),
    "link": ("bytes per second", 1e8, 1e15),
    "network": ("bytes per second", 1e7, 1e14),
    "host_link": ("bytes per second", 1e8, 1e15),
}


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class _Reached:
    """Fractions of the peak that training steps reach."""

    products: _Share
    attention: _Share
    tensor_overlap: _Overlap
    products_8bit: _Share | None = None


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class _Machine:
    """One machine of the file; the comment in topologies.toml explains every key."""

    based_on: str | None = None  # another machine, which has all that is not said here
    platform: Literal["cuda", "rocm"] | None = None
    memory: _Amount | None = None
    bandwidth: _Amount | None = None
    flops: dict[Literal["bfloat16", "float32", "fp8", "int8"], _Amount] | None = None
    link: _Amount | None = None
    group: _Count | None = None
    per_host: _Count | None = None
    network: _Amount | None = None
    host_link: _Amount | None = None
    achieved: _Reached | None = None
    gpu: dict[str, str | int | float] | None = None
    source: _Text | None = None

    def settings(self) -> dict[str, Any]:
        """Return what the file says, in the form of a machine's table."""
        found = {name: value for name, value in vars(self).items() if value is not None}
        found.pop("based_on", None)
        if self.achieved is not None:
            shares = vars(self.achieved).items()
            found["achieved"] = {name: share for name, share in shares if share is not None}
        return found


_GPU = {
    "name": str, "capability": int, "minor": int, "cores": int, "threads": int, "l2": int,
    "clock_ghz": (int, float), "shared_memory": int,
}  # fmt: skip
_OPTIONAL_OF_GPU = {"minor", "threads"}
# As _PLAUSIBLE, of the numbers that XLA reads: MHz, MB and kB are outside.
_PLAUSIBLE_OF_GPU = {
    "capability": ("the major version of the compute capability", 5, 50),
    "minor": ("the minor version of the compute capability", 0, 9),
    "cores": ("the number of streaming multiprocessors", 1, 10_000),
    "threads": ("threads of a multiprocessor", 256, 16_384),
    "l2": ("bytes", 1e5, 1e11),
    "clock_ghz": ("GHz", 0.1, 10),
    "shared_memory": ("bytes", 1e4, 1e8),
}


def with_machines_of(path: Path, shown: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of known machines with those that a file adds or changes.

    Args:
        path: the file.
        shown: its name, for messages.
        known: tables of machines by name.

    Raises:
        LoweringError: the file cannot be read, or describes a machine wrongly; the message names
            every problem.
    """
    try:
        document = read_toml(path)
    except OSError as error:
        raise LoweringError(f"{shown}: cannot be read: {error.strerror}") from None
    except DocumentError as error:
        raise LoweringError(f"{shown}: {error}") from None
    tables, problems = dict(known), []
    for name, entry in document.items():
        try:
            numbers = {"file": shown, "file_numbers": [*entry] if isinstance(entry, dict) else []}
            tables[name] = _table(name, entry, known) | numbers
        except _Wrong as error:
            problems += [f"{shown}: [{name[:60]}] {reason}" for reason in error.reasons]
    if problems:
        raise LoweringError("\n".join(problems))
    return tables


class _Wrong(Exception):
    """A machine of the file is described wrongly."""

    def __init__(self, *reasons: str) -> None:
        super().__init__(*reasons)
        self.reasons = reasons


def _table(name: str, entry: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of one machine of the file; raise _Wrong with all reasons."""
    if name == "cpu":
        raise _Wrong("cpu is this machine, whose numbers are read when a command runs")
    if not _NAME.fullmatch(name):
        raise _Wrong("a name has small letters, digits, '.', '_' and '-', and begins with a letter")
    machine = _validated(entry)
    settings = machine.settings()
    base = machine.based_on or (name if name in known else None)
    if base is None:
        if missing := [key for key in _REQUIRED if key not in settings]:
            example = next(iter(known))
            raise _Wrong(
                f"lacks {', '.join(missing)}; add them, or based_on, as in based_on = {example!r}"
            )
        table = settings
    else:
        table = _changed(base, settings, known, is_new=base != name)
    if problems := [*_problems(table)]:
        raise _Wrong(*problems)
    return table


def _validated(entry: Any) -> _Machine:
    if not isinstance(entry, dict):
        raise _Wrong("is not a table; write [NAME] before the numbers of a machine")
    try:
        # Through JSON, because the strict mode of pydantic refuses dictionaries for dataclasses.
        return TypeAdapter(_Machine).validate_json(json.dumps(entry, default=str))
    except ValidationError as error:
        raise _Wrong(*map(_words, error.errors(include_url=False, include_input=False))) from None


def _words(problem: Any) -> str:
    """Return a problem of pydantic in one line."""
    where = ".".join(str(part) for part in problem["loc"] if part != "[key]")[:100]
    if problem["type"] == "unexpected_keyword_argument":
        names = [one.name for one in dataclasses.fields(_Machine)]
        close = difflib.get_close_matches(where, names, n=1)
        return f"{where}: unknown; " + (
            f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"
        )
    return f"{where}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _changed(
    base: str, settings: dict[str, Any], known: Mapping[str, Any], *, is_new: bool
) -> dict[str, Any]:
    """Return the table of a known machine with other numbers."""
    if base not in known:
        close = difflib.get_close_matches(base[:100], known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
        raise _Wrong(f"based_on: unknown machine {base[:100]!r}; {hint}")
    table = dict(known[base])
    if settings.get("platform", table["platform"]) != table["platform"]:
        raise _Wrong(f"platform: {base} has the platform {table['platform']!r}; remove it")
    if is_new and "achieved" in table:  # of the steps that were published of the other machine
        table["like"] = base
        del table["achieved"]
    if is_new and table["platform"] == "tpu":
        table["compiled_as"] = base
    for key in ("flops", "gpu"):
        if key in settings and key in table:
            settings[key] = table[key] | settings[key]
    settings["source"] = settings.get("source", f"as {base}, but what the file says")
    return table | settings


def _implausible(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the numbers that no machine has, which are in another unit."""
    for key, (unit, least, most) in _PLAUSIBLE.items():
        numbers = {key: table.get(key)}
        if key == "flops":
            numbers = {f"{key}.{dtype}": number for dtype, number in table[key].items()}
        for name, number in numbers.items():
            if number is not None and not least <= number <= most:
                yield _not_plausible(name, number, unit, least, most)


def _not_plausible(name: str, number: float, unit: str, least: float, most: float) -> str:
    return (
        f"{name} = {number:g}: not plausible; write {unit}, from {_short(least)} to {_short(most)}"
    )


def _short(number: float) -> str:
    """Return a number as people write it in TOML: 1e9 and not 1e+09."""
    return re.sub(r"e\+0*", "e", f"{number:g}")


def _problems(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield what contradicts in a table, or what a compiler would lack."""
    yield from _implausible(table)
    if "bfloat16" not in table["flops"]:
        yield "flops: bfloat16 is missing, by which plans compare machines"
    if "link" in table and "group" not in table and table["platform"] in ("cuda", "rocm"):
        yield "group is missing: the number of devices that the link connects, those of a host"
    group, per_host = table.get("group", 0), table.get("per_host", 0)
    if per_host and group and group % per_host:
        yield (
            f"group = {group} is not a multiple of per_host = {per_host}: the link connects the "
            "devices of whole hosts; describe the slower link that does"
        )
    card = table.get("gpu")
    if card is None:
        return
    for key, value in card.items():
        if key not in _GPU:
            yield f"gpu.{key}: unknown; known: {', '.join(_GPU)}"
        elif not isinstance(value, _GPU[key]) or (key not in ("name", "minor") and value <= 0):
            expected = "a text" if key == "name" else "a positive number"
            yield f"gpu.{key} = {value!r}: should be {expected}"
        elif key in _PLAUSIBLE_OF_GPU:
            unit, least, most = _PLAUSIBLE_OF_GPU[key]
            if not least <= value <= most:
                yield _not_plausible(f"gpu.{key}", value, unit, least, most)
    if missing := [key for key in _GPU if key not in card and key not in _OPTIONAL_OF_GPU]:
        yield f"gpu lacks {', '.join(missing)}, which XLA needs to compile for it"
    if table["platform"] == "cuda" and "bandwidth" not in table:
        yield "bandwidth is missing, which XLA needs to compile for it"
