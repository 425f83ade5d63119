"""Collectives of a compiled program: operation x mesh axes x count x bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lowering.groups import axes_of, groups_of
from lowering.hlo import Instruction, Module, arrays_of, parse
from sharding_rules.mesh import MeshShape

_OPS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_ROOT = Path(__file__).parent.parent
_PLUMBING = (  # what every model calls; the caller's line says more
    "lowering/constrain.py",
    "graphtrain/models/dot.py",
    "graphtrain/models/projection.py",
)
_GENERATIONS = 5  # of operands, to find out where a collective without a name comes from


@dataclass(frozen=True)
class Collective:
    """One collective operation of a program's text, with how often a step executes it."""

    op: str  # all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute
    axes: tuple[str, ...]  # mesh axes along which the devices of a group differ, slowest first
    devices: int  # in one group
    count: int  # executions in a step: the trip counts of the loops around it, multiplied
    bytes: int  # of what one group handles in one execution, per device, in its unsplit form:
    # the result of an all-gather, the operand of a reduce-scatter, either of the others
    dtype: str = ""
    source: str = ""  # line of the model's code, as in "graphtrain/models/mlp.py:45"
    scope: str = ""  # names around the operation, as JAX gives them to the compiler
    loops: tuple[int, ...] = ()  # trip counts around it, outermost first

    @property
    def wire_bytes(self) -> float:
        """Bytes a device sends in one execution, by the algorithm that sends least."""
        share = (self.devices - 1) / self.devices
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.op, share)
        return factor * self.bytes

    @property
    def wire_bytes_per_step(self) -> float:
        return self.count * self.wire_bytes

    def to_record(self) -> dict[str, Any]:
        """As JSON, for the record of a compiled program."""
        return asdict(self) | {"axes": list(self.axes), "loops": list(self.loops)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Collective:
        return cls(**{**record, "axes": tuple(record["axes"]), "loops": tuple(record["loops"])})


@dataclass(frozen=True)
class Reading:
    """All collectives of a program."""

    collectives: tuple[Collective, ...]
    unknown_loops: int  # whose trip count the text does not tell; they count as one trip


def read(text: str, mesh: MeshShape) -> Reading:
    """Read the optimized HLO of a partitioned program: what compiled.as_text() gives.

    Collectives that are alike in everything but their place in the text are one, with their counts
    added up.
    """
    reader = _Reader(parse(text), mesh)
    found = list(reader.walk(reader.module.entry, ()))
    counts: Counter[Collective] = Counter()
    for collective in found:
        counts[replace(collective, count=0)] += collective.count
    merged = (replace(collective, count=count) for collective, count in counts.items())
    largest_first = sorted(merged, key=lambda one: -one.wire_bytes_per_step)
    return Reading(tuple(largest_first), reader.unknown_loops)


class _Reader:
    """A walk through the computations of a module, as often as they run."""

    def __init__(self, module: Module, mesh: MeshShape) -> None:
        self.module = module
        self.mesh = mesh
        self.unknown_loops = 0
        self._pieces: set[tuple[str, str, str]] = set()

    def walk(self, computation: str, loops: tuple[int, ...]) -> Iterator[Collective]:
        for instruction in self.module.computations.get(computation, ()):
            op = instruction.opcode.removesuffix("-start")
            if op in _OPS:
                if self._is_repeated(instruction):
                    continue
                if (collective := self._collective(instruction, op, loops)) is not None:
                    yield replace(collective, **self._origin(instruction, computation))
            elif op == "while":
                trips = self._trips(instruction)
                yield from self.walk(instruction.attribute("body") or "", (*loops, trips))
            elif op in ("fusion", "call", "conditional", "async", "async-start"):
                changes = {"op": "reduce-scatter"} if _fused_reduce_scatter(instruction) else {}
                for name in instruction.called:
                    for collective in self.walk(name, loops):
                        if not collective.scope:
                            changes |= self._origin(instruction, computation)
                        yield replace(collective, **changes)

    def _is_repeated(self, instruction: Instruction) -> bool:
        """TPU programs spread an all-gather over the products it hides behind, a piece in each;
        the pieces share its channel. Distinct reductions may share one, but not their shape."""
        channel = re.search(r"channel_id=(\d+)", instruction.text)
        if channel is None:
            return False
        shape = "" if instruction.opcode == "all-gather" else instruction.shape
        piece = instruction.opcode, shape, channel[1]
        repeated = piece in self._pieces
        self._pieces.add(piece)
        return repeated

    def _trips(self, loop: Instruction) -> int:
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.text):
            return int(known[1])
        # TPU programs do not say; the condition compares with its only constant.
        condition = self.module.computations.get(loop.attribute("condition") or "", ())
        constants = {
            int(one.text.partition(")")[0])
            for one in condition
            if one.opcode == "constant" and one.shape.startswith("s32[]")
        }
        if len(constants) == 1:
            return constants.pop()
        self.unknown_loops += 1
        return 1

    def _collective(
        self, instruction: Instruction, op: str, loops: tuple[int, ...]
    ) -> Collective | None:
        groups = groups_of(instruction.text, self.mesh.devices)
        axes = axes_of(groups, self.mesh)
        if not axes:
            return None  # groups of one device
        devices = self.mesh.size(axes) if op == "collective-permute" else len(groups[0])
        arrays = _handled(instruction, op)
        count = 1
        for trips in loops:
            count *= trips
        return Collective(
            op=op,
            axes=axes,
            devices=devices,
            count=count,
            bytes=sum(size for _, size in arrays) * (devices if op == "reduce-scatter" else 1),
            dtype=max(arrays, key=lambda array: array[1], default=("", 0))[0],
            loops=loops,
        )

    def _origin(self, instruction: Instruction, computation: str) -> dict[str, Any]:
        """Source and scope; the compiler forgets them where it joins several collectives to one,
        and then what made the operands tells."""
        by_name = {one.name: one for one in self.module.computations[computation]}
        generation = [instruction]
        for _ in range(_GENERATIONS):
            told = next((one for one in generation if one.scope), None)
            if told is not None:
                return {"source": self._source(told), "scope": told.scope}
            names = [name for one in generation for name in one.operands]
            generation = [by_name[name] for name in names if name in by_name]
        return {}

    def _source(self, instruction: Instruction) -> str:
        """The innermost line of a model: not of JAX, nor of what every model calls."""
        fallback = ""
        for file, _, line in self.module.frames(instruction):
            path = Path(file)
            name = path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else file
            if "site-packages" in file or name in _PLUMBING:
                continue
            if name.startswith("graphtrain/models/"):
                return f"{name}:{line}"
            fallback = fallback or f"{name}:{line}"
        return fallback


def _handled(instruction: Instruction, op: str) -> list[tuple[str, int]]:
    """Type and bytes of the results; a start also carries its operands in front, and counters."""
    arrays = arrays_of(instruction.shape)
    if not instruction.opcode.endswith("-start") or op == "all-reduce":
        return arrays
    if op == "collective-permute":
        return arrays[1:2]
    return arrays[len(arrays) // 2 :]


def _fused_reduce_scatter(instruction: Instruction) -> bool:
    """TPU programs write a reduce-scatter as a fusion of an all-reduce and a slice."""
    return any(name.startswith("all-reduce-scatter") for name in instruction.called)
