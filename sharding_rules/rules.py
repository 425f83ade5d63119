"""Rules: tables from array axis to mesh axes, from presets and from the user's files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from sharding_rules.arrays import Role
from sharding_rules.axes import ARRAY_AXES, MESH_AXES, check_axes
from sharding_rules.documents import DocumentError, read_toml
from sharding_rules.errors import ShardingError

Table = Mapping[str, tuple[str, ...]]

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
            ShardingError: a name is unknown, or a file is not a valid rule table.
        """
        tables: dict[str, dict[str, tuple[str, ...]]] = {name: {} for name in _TABLES}
        arrays: dict[str, Table] = {}
        for name in names:
            document = _read(name)
            unknown = set(document) - {*_TABLES, "arrays"}
            if unknown:
                raise ShardingError(
                    f"rules {name!r}: unknown table {sorted(unknown)[0]!r}; known tables: "
                    f"{', '.join((*_TABLES, 'arrays'))}"
                )
            for table in _TABLES:
                _merge(tables[table], document.get(table, {}), name)
            for pattern, table in document.get("arrays", {}).items():
                if not isinstance(table, Mapping):
                    raise ShardingError(
                        f"rules {name!r}: arrays.{pattern!r} = {table!r} is not a table; map "
                        "array axes to mesh axes"
                    )
                _merge(override := {}, table, name)
                arrays[pattern] = {**arrays.get(pattern, {}), **override}
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
                tail = pattern.rsplit("/", 1)[-1].strip("*")
                similar_paths = [path for path in paths if tail and tail in path] or paths
                raise ShardingError(
                    f"rules, arrays {pattern!r}: no array matches; an example of a path is "
                    f"{similar_paths[0].removeprefix('state/')!r}"
                )


def matches(path: str, pattern: str) -> bool:
    """Return whether a pattern matches a path, or the rest of a path after any "/"."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"*/{pattern}")


def presets() -> list[str]:
    """Return the names of the rule tables that are included in graphtrain."""
    return sorted(path.stem for path in _PRESETS.glob("*.toml"))


def _read(name: str) -> dict:
    path = Path(name) if name.endswith(".toml") else _PRESETS / f"{name}.toml"
    try:
        return read_toml(path)
    except FileNotFoundError:
        raise ShardingError(
            f"unknown rules {name!r}; use a preset ({', '.join(presets())}) or the path of a .toml "
            "file"
        ) from None
    except OSError as error:
        raise ShardingError(f"rules {name}: cannot be read: {error.strerror}") from None
    except DocumentError as error:
        raise ShardingError(f"rules {name}: {error}") from None


def _merge(merged: dict[str, tuple[str, ...]], table: Mapping, name: str) -> None:
    for axis, value in table.items():
        added = (value,) if isinstance(value, str) else value
        if not isinstance(added, list | tuple) or not all(
            isinstance(name_or_axis, str) for name_or_axis in added
        ):
            raise ShardingError(
                f"rules {name!r}: {axis} = {value!r} is not a mesh axis or a list of mesh axes"
            )
        merged[axis] = _in_mesh_order({*merged.get(axis, ()), *added})


def _union(table: Table, other: Table) -> Table:
    """Merge two tables; an array axis in both is split by the mesh axes of both."""
    axes = {*table, *other}
    return {axis: _in_mesh_order({*table.get(axis, ()), *other.get(axis, ())}) for axis in axes}


def _in_mesh_order(names: set[str]) -> tuple[str, ...]:
    """Sort mesh axes in mesh order, so that the order of presets does not change the plan."""
    known_axes = tuple(name for name in MESH_AXES if name in names)
    return known_axes + tuple(sorted(names - set(known_axes)))
