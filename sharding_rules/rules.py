"""Rules: tables from array axis to mesh axes, from presets and from the user's files."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from sharding_rules.arrays import Role
from sharding_rules.axes import ARRAY_AXES, MESH_AXES, check_axes, unknown_axis
from sharding_rules.documents import DocumentError, read_toml
from sharding_rules.errors import RuleProblem, RulesError, ShardingError

Table = Mapping[str, tuple[str, ...]]

_OTHER_NAMES = {  # of presets, in other tools
    "zero3": "fsdp", "zero-3": "fsdp", "hsdp": "fsdp", "dp": "data", "ddp": "data", "tp": "tensor",
    "sp": "sequence", "cp": "context", "ring": "context", "pp": "pipeline", "ep": "expert",
    "zero-1": "zero1", "zero-2": "zero2",
}  # fmt: skip
_PRESETS = Path(__file__).parent / "presets"
_TABLES = ("parameters", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class Rules:
    """Mesh axes that split each array axis: of stored parameters, and of activations.

    Gradients and optimizer state are split like their parameters, and further by their own tables
    (ZeRO-1 and ZeRO-2). `arrays` overrides these tables for arrays whose path matches a pattern.
    """

    parameters: Table
    activations: Table
    gradients: Table = field(default_factory=dict)
    optimizer: Table = field(default_factory=dict)
    arrays: Mapping[str, Table] = field(default_factory=dict)

    def __post_init__(self) -> None:
        overrides = ((f"arrays {pattern!r}", table) for pattern, table in self.arrays.items())
        for location, table in (*((name, getattr(self, name)) for name in _TABLES), *overrides):
            check_axes(table, ARRAY_AXES, f"rules, {location}")
            for axis, mesh_axes in table.items():
                check_axes(mesh_axes, MESH_AXES, f"rules, {location}: {axis!r}")

    @classmethod
    def load(cls, names: Sequence[str]) -> "Rules":
        """Combine presets and files (names that end in .toml); the union of their mesh axes.

        Raises:
            RulesError: names are unknown, or files are not valid rule tables; has all problems.
        """
        tables: dict[str, dict[str, tuple[str, ...]]] = {name: {} for name in _TABLES}
        arrays: dict[str, Table] = {}
        problems = [*_exclusive_presets(names)]
        for name in names:
            document = _read(name, problems)
            for table in _TABLES:
                _merge(tables[table], document.get(table, {}), (table,), name, problems)
            for pattern, table in document.get("arrays", {}).items():
                _merge(override := {}, table, ("arrays", pattern), name, problems)
                arrays[pattern] = {**arrays.get(pattern, {}), **override}
        if problems:
            raise RulesError(problems)
        return cls(arrays=arrays, **tables)

    def table_for(self, role: Role, path: str = "") -> Table:
        """Return the table for an array with this role and path."""
        table = self._by_role[role]
        for pattern, override in self.arrays.items():
            if role != "activation" and matches(path, pattern):
                table = {**table, **override}
        return table

    @cached_property
    def _by_role(self) -> dict[Role, Table]:
        """Tables by role, cached because a search reads them for thousands of strategies."""
        return {
            "parameter": self.parameters,
            "buffer": self.parameters,
            "constant": self.parameters,
            "frozen": self.parameters,
            "gradient": _union(self.parameters, self.gradients),
            "optimizer": _union(self.parameters, self.optimizer),
            "activation": self.activations,
        }

    def without_mesh_axes(self, mesh_axes: Iterable[str]) -> "Rules":
        """Return the rules without some mesh axes."""
        dropped = set(mesh_axes)

        def drop_axes(table: Table) -> Table:
            return {
                axis: tuple(name for name in names if name not in dropped)
                for axis, names in table.items()
            }

        arrays = {pattern: drop_axes(table) for pattern, table in self.arrays.items()}
        return Rules(arrays=arrays, **{name: drop_axes(getattr(self, name)) for name in _TABLES})

    def check_patterns(self, paths: Iterable[str]) -> None:
        """Check that every pattern of `arrays` matches; otherwise it would silently do nothing.

        Raises:
            ShardingError: a pattern matches no array; the message contains a similar path.
        """
        paths = list(paths)
        for pattern in self.arrays:
            if not any(matches(path, pattern) for path in paths):
                raise ShardingError(
                    f"rules, arrays {pattern!r}: no array matches; {_similar(pattern, paths)}"
                )


def _similar(pattern: str, paths: Sequence[str]) -> str:
    """Return a hint: a pattern that matches and is spelt alike, or an example of a path."""
    depth = pattern.count("/")
    tails = {"/".join(path.split("/")[-depth - 1 :]) for path in paths}
    wildcard = "/*" if pattern.endswith("/*") else ""
    known = sorted({tail.rpartition("/")[0] if wildcard else tail for tail in tails})
    if close := difflib.get_close_matches(pattern.removesuffix("/*")[:100], known, n=1):
        return f"did you mean {close[0] + wildcard!r}?"
    return f"an example of a path is {paths[0].removeprefix('state/')!r}"


def matches(path: str, pattern: str) -> bool:
    """Return whether a pattern matches a path, or the rest of a path after any "/"."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"*/{pattern}")


def presets() -> list[str]:
    """Return the names of the rule tables that are included in graphtrain."""
    return sorted(path.stem for path in _PRESETS.glob("*.toml"))


def _exclusive_presets(names: Sequence[str]) -> Iterator[RuleProblem]:
    """Yield a problem if names have two presets for the same mesh axis."""
    if {"context", "ulysses"} <= {*names}:
        reason = '"ulysses" replaces "context": both divide sequences along context; remove one'
        yield RuleProblem("ulysses", (), reason)


def _read(name: str, problems: list[RuleProblem]) -> dict[str, Any]:
    """Return the tables in a preset or a file; add what is wrong with it as a whole."""
    is_file = name.endswith(".toml")
    try:
        document = read_toml(Path(name) if is_file else _PRESETS / f"{name}.toml")
    except FileNotFoundError:
        problems.append(RuleProblem(name, (), _absent(name)))
        return {}
    except (OSError, DocumentError) as error:
        reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        problems.append(RuleProblem(name, (), reason))
        return {}
    known = (*_TABLES, "arrays")
    for table in document:
        if table not in known:
            hint = _closest(table, known) or f"known tables: {', '.join(known)}"
            problems.append(RuleProblem(name, (table,), f"unknown table {table!r}; {hint}"))
        elif not isinstance(document[table], dict):
            problems.append(RuleProblem(name, (table,), f"{document[table]!r} is not a table"))
    return {table: value for table, value in document.items() if isinstance(value, dict)}


def _absent(name: str) -> str:
    if name.endswith(".toml"):
        folder = Path(name).parent
        present = [str(folder / path.name) for path in folder.glob("*.toml")]
        return f"no such file; {_closest(name, present) or 'write it, or name a preset'}"
    if (preset := _OTHER_NAMES.get(name.lower())) is not None:
        return f"no such preset; it is {preset} in graphtrain"
    hint = _closest(name, presets())
    every = f"use a preset ({', '.join(presets())}) or the path of a .toml file"
    return f"no such preset; {hint or every}"


def _closest(name: str, known: Iterable[str]) -> str:
    """Return a hint with the most similar name; empty if none is similar."""
    close = difflib.get_close_matches(name[:100], list(known), n=1)
    return f"did you mean {close[0]}?" if close else ""


def _merge(
    merged: dict[str, tuple[str, ...]],
    table: Any,
    key: tuple[str, ...],
    name: str,
    problems: list[RuleProblem],
) -> None:
    """Add the rules in a table of a file to those of others; add what is wrong with it."""
    if not isinstance(table, Mapping):
        reason = f"{table!r} is not a table; map array axes to mesh axes"
        problems.append(RuleProblem(name, key, reason))
        return
    for axis, value in table.items():
        added = (value,) if isinstance(value, str) else value
        if reason := _wrong_rule(axis, value, added):
            problems.append(RuleProblem(name, (*key, axis), reason))
        else:
            merged[axis] = _in_mesh_order({*merged.get(axis, ()), *added})


def _wrong_rule(axis: str, value: Any, mesh_axes: Any) -> str:
    """Return what is wrong with the mesh axes of an array axis; empty if nothing is."""
    if problem := unknown_axis(axis, ARRAY_AXES):
        return problem
    is_list = isinstance(mesh_axes, list | tuple)
    if not is_list or not all(isinstance(one, str) for one in mesh_axes):
        return f"{value!r} is not a mesh axis or a list of mesh axes"
    if len(set(mesh_axes)) < len(mesh_axes):
        return f"{value!r} names a mesh axis twice"
    return next(filter(None, (unknown_axis(one, MESH_AXES) for one in mesh_axes)), "")


def _union(table: Table, other: Table) -> Table:
    """Merge two tables; an array axis in both is split by the mesh axes of both."""
    axes = {*table, *other}
    return {axis: _in_mesh_order({*table.get(axis, ()), *other.get(axis, ())}) for axis in axes}


def _in_mesh_order(names: set[str]) -> tuple[str, ...]:
    """Sort mesh axes in mesh order, so that the order of presets does not change the plan."""
    known_axes = tuple(name for name in MESH_AXES if name in names)
    return known_axes + tuple(sorted(names - set(known_axes)))
