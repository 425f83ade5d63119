"""Rules: array axis to mesh axes, from the presets and from a user's own tables."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sharding_rules.arrays import Role
from sharding_rules.axes import ARRAY_AXES, MESH_AXES, check_axes
from sharding_rules.errors import ShardingError

Table = Mapping[str, tuple[str, ...]]

_PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class Rules:
    """Which mesh axes split an array axis: for weights at rest, and for what a step computes."""

    parameters: Table
    activations: Table

    def __post_init__(self) -> None:
        for table in (self.parameters, self.activations):
            check_axes(table, ARRAY_AXES, "rules")
            for axis, mesh_axes in table.items():
                check_axes(mesh_axes, MESH_AXES, f"rule for {axis!r}")

    @classmethod
    def load(cls, names: Sequence[str]) -> "Rules":
        """Combine presets (and files ending in .toml); each adds its mesh axes to the others'."""
        parameters: dict[str, tuple[str, ...]] = {}
        activations: dict[str, tuple[str, ...]] = {}
        for name in names:
            document = _read(name)
            unknown = set(document) - {"parameters", "activations"}
            if unknown:
                raise ShardingError(f"rules {name!r}: unknown table {sorted(unknown)[0]!r}")
            _merge(parameters, document.get("parameters", {}), name)
            _merge(activations, document.get("activations", {}), name)
        return cls(parameters, activations)

    def of(self, role: Role) -> Table:
        """The table an array follows; optimizer state rests where its parameter does."""
        return self.activations if role == "activation" else self.parameters


def presets() -> list[str]:
    """Names of the strategies that come with graphtrain."""
    return sorted(path.stem for path in _PRESETS.glob("*.toml"))


def _read(name: str) -> dict:
    path = Path(name) if name.endswith(".toml") else _PRESETS / f"{name}.toml"
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ShardingError(
            f"no rules {name!r}; presets: {', '.join(presets())}, or the path of a .toml file"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ShardingError(f"rules {name}: {error}") from None


def _merge(into: dict[str, tuple[str, ...]], table: Mapping, name: str) -> None:
    for axis, value in table.items():
        added = (value,) if isinstance(value, str) else tuple(value)
        if not all(isinstance(mesh_axis, str) for mesh_axis in added):
            raise ShardingError(f"rules {name!r}: {axis} = {value!r} is not a mesh axis or a list")
        together = {*into.get(axis, ()), *added}
        # Mesh order, not file order, so that combining presets either way is the same plan.
        known = tuple(mesh_axis for mesh_axis in MESH_AXES if mesh_axis in together)
        into[axis] = known + tuple(sorted(together - set(known)))
