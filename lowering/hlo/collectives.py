"""Collectives of a compiled program: operation x mesh axes x count x bytes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from lowering.hlo import fused_collectives
from lowering.hlo.conditionals import branches, fraction_taken
from lowering.hlo.flops import instruction_flops
from lowering.hlo.instruction_facts import dimension_of, kernel_of, sent_shapes
from lowering.hlo.pipeline_sums import has_compute_beside, mark_exposed
from lowering.hlo.provenance import Provenance
from lowering.hlo.quantized_products import quantized_product
from lowering.hlo.replica_groups import mesh_axes_of_groups, parse_groups
from lowering.hlo.slice_transfers import operation_across_slices
from lowering.hlo.text import Computation, HloModule, Instruction, arrays, nbytes, parse
from lowering.hlo.trip_counts import trip_count
from lowering.tracing.gradient_scopes import BESIDE_TICK
from sharding_rules.mesh import MeshShape

COLLECTIVE_OPS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Attribute that names the computation an instruction runs. Reducers and comparators are left out:
# they contain no collectives.
CALLED_BY = {"fusion": "calls", "call": "to_apply", "async": "calls"}
_SCHEDULED = "is_scheduled=true"  # in the first line of a program


@dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program, with its executions per step."""

    op: str  # all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute
    axes: tuple[str, ...]  # mesh axes along which the devices of a group differ, slowest first
    devices: int  # in one group
    count: int  # executions in a step: the product of the trip counts of the enclosing loops
    bytes: int  # size of the unsplit array of one group in one execution, per device:
    # the result of an all-gather, the operand of a reduce-scatter, either for the other operations
    dtype: str = ""
    source: str = ""  # line of the model's code, as in "graphtrain/models/mlp.py:45"
    scope: str = ""  # name stack of the operation (op_name in HLO metadata)
    loops: tuple[int, ...] = ()  # trip counts of the enclosing loops, outermost first
    arrays: tuple[str, ...] = ()  # paths of the program inputs that it moves, where known
    shapes: tuple[str, ...] = ()  # of one device's operands, as in "bf16[64,128]"
    dimension: int | None = None  # dimension of the operand that is gathered or scattered
    decomposed_from: str = ""  # all-gather or reduce-scatter of which this permute is one step
    network: str = ""  # "dcn": the part across TPU slices; other groups are inside of a slice
    exposed: bool = False  # sum of a pipeline's gradients with no compute beside it
    beside_tick: bool = False  # sum of such gradients that the compiler overlaps with a tick

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Dimension sizes of each of one device's operands."""
        return tuple(sizes for shape in self.shapes for _, sizes in arrays(shape))

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in one execution, with the algorithm that sends least."""
        share = (self.devices - 1) / self.devices
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.op, share)
        return factor * self.bytes

    @property
    def wire_bytes_per_step(self) -> float:
        return self.count * self.wire_bytes

    def to_record(self) -> dict[str, Any]:
        """Return the fields as JSON, without empty ones."""
        empty = ("", (), None)
        fields = vars(self).items()
        return {name: value for name, value in fields if value is not False and value not in empty}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Collective:
        lists = {name: tuple(value) for name, value in record.items() if isinstance(value, list)}
        return cls(**{"axes": (), **record, **lists})


@dataclass(frozen=True)
class ProgramFacts:
    """Collectives, FLOPs and kernels that one device executes in one step, read from HLO text."""

    collectives: tuple[Collective, ...] = ()
    flops: float = 0.0  # of matrix products, with loop trip counts included
    unknown_loops: int = 0  # loops whose trip count is unknown; their body is counted once
    kernels: Mapping[str, int] = field(default_factory=dict)  # executions by name of custom call
    # The first collective over each set of mesh axes, in the order of the schedule; empty if the
    # program is not scheduled.
    first_collectives: tuple[Collective, ...] = ()
    # Executions of the products that were asked for in fp8 or int8; see quantized_products.
    products: Mapping[str, int] = field(default_factory=dict)

    def to_record(self) -> dict[str, Any]:
        """Return the fields as JSON, by name."""
        return {
            "collectives": [each.to_record() for each in self.collectives],
            "flops": self.flops,
            "unknown_loops": self.unknown_loops,
            "kernels": dict(self.kernels),
            "first_collectives": [each.to_record() for each in self.first_collectives],
            **({"products": dict(self.products)} if self.products else {}),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ProgramFacts:
        """Return the Reading stored in the record of a compiled program."""
        return cls(
            tuple(Collective.from_record(each) for each in record["collectives"]),
            record["flops"],
            record["unknown_loops"],
            record["kernels"],
            tuple(Collective.from_record(each) for each in record.get("first_collectives", ())),
            record.get("products", {}),
        )

    @property
    def wire_bytes(self) -> float:
        return sum(each.wire_bytes_per_step for each in self.collectives)


def read(text: str, mesh: MeshShape, slices: int = 1) -> ProgramFacts:
    """Read an optimized program, as returned by `compiled.as_text()` on CPU, GPU and TPU.

    A program for several TPU slices is that of one slice: groups of its collectives are inside of
    it, and transfers across slices are collectives with the network "dcn".

    Operations that differ only in their position in the program are merged into one Collective, and
    their counts are added. A conditional counts as the branch that sends most, in the iterations
    that its scope states (lowering/tracing/control_flow.py).
    """
    module = parse(text)
    reading = _in_whole_numbers(ProgramReader(module, mesh, slices).read_computation(module.entry))
    if mesh.axes.get("stage", 1) > 1:
        marked = mark_exposed(reading.collectives)
        reading = dataclasses.replace(reading, collectives=marked)
    firsts: dict[tuple[str, ...], Collective] = {}
    if _SCHEDULED in text.partition("\n")[0]:
        for each in reading.collectives:  # in the order of the text, which is that of the schedule
            firsts.setdefault(each.axes, each)
    return dataclasses.replace(
        reading,
        collectives=merged(_mark_decomposed(reading.collectives)),
        first_collectives=tuple(firsts.values()),
    )


def merged(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Merge collectives that differ only in count; sort by bytes sent per step, descending."""
    counts: Counter[Collective] = Counter()
    for collective in collectives:
        counts[dataclasses.replace(collective, count=1)] += collective.count
    merged_collectives = (
        dataclasses.replace(collective, count=count) for collective, count in counts.items()
    )
    return tuple(sorted(merged_collectives, key=lambda collective: -collective.wire_bytes_per_step))


def _mark_decomposed(collectives: tuple[Collective, ...]) -> Iterable[Collective]:
    """Set `decomposed_from` on the first and last step of a collective decomposed into permutes.

    Those steps are outside the loop that contains the others, and share their scope.
    """
    permutes = [collective for collective in collectives if collective.op == "collective-permute"]
    decomposed_ops = {
        collective.scope: collective.decomposed_from
        for collective in permutes
        if collective.decomposed_from
    }
    for collective in collectives:
        if collective.op == "collective-permute" and collective.scope in decomposed_ops:
            yield dataclasses.replace(collective, decomposed_from=decomposed_ops[collective.scope])
        else:
            yield collective


class ProgramReader:
    """Reader that visits each computation once, regardless of how many instructions call it."""

    def __init__(self, module: HloModule, mesh: MeshShape, slices: int = 1) -> None:
        across = mesh.across(slices)
        self.module = module
        self.mesh = MeshShape({name: size // across[name] for name, size in mesh.axes.items()})
        self.axes_across = tuple(name for name, size in across.items() if size > 1)
        self.slices = slices
        self.origins = Provenance(module)
        self._read: dict[str, ProgramFacts] = {}

    def read_computation(self, name: str) -> ProgramFacts:
        """Return what one execution of a computation does, with all that it calls."""
        if name not in self._read:
            computation = self.module.computations[name]
            parts = [
                self.read_instruction(computation, i) for i in computation.instructions.values()
            ]
            self._read[name] = _sum(parts)
        return self._read[name]

    def read_instruction(self, computation: Computation, instruction: Instruction) -> ProgramFacts:
        """Return what one execution of an instruction does."""
        opcode = instruction.opcode
        if opcode == "while":
            return self._loop(computation, instruction)
        if opcode == "conditional":
            return self._conditional(instruction)
        base = opcode.removesuffix("-start")
        if base in COLLECTIVE_OPS:
            collective = self.read_collective(computation, instruction, base)
            return ProgramFacts(collectives=(collective,) if collective else ())
        if (across := operation_across_slices(instruction)) is not None:
            sent = self._read_transfer(computation, instruction, across)
            return ProgramFacts(collectives=(sent,) if sent else ())
        if base in CALLED_BY and (called := instruction.attribute(CALLED_BY[base])):
            return self.read_computation(called)
        flops = instruction_flops(computation, instruction)
        products = quantized_product(computation, instruction)
        return ProgramFacts(flops=flops, kernels=kernel_of(instruction), products=products)

    def _read_transfer(
        self, computation: Computation, instruction: Instruction, op: str
    ) -> Collective | None:
        """Return the part of a collective that is across slices; None if it moves nothing."""
        shapes = computation.operand_shapes(instruction)[:1]  # without the token
        if not self.axes_across or not shapes:
            return None
        size = nbytes(shapes[0]) * (self.slices if op == "all-gather" else 1)
        scope, source = self.origins.locate(computation, instruction)
        return Collective(
            op=op,
            axes=self.axes_across,
            devices=self.slices,
            count=1,
            bytes=size,
            dtype=arrays(shapes[0])[0][0],
            source=source,
            scope=scope,
            arrays=self.origins.arrays(computation, instruction, through_loops=False),
            shapes=(shapes[0].partition("{")[0],),
            network="dcn",
        )

    def _loop(self, computation: Computation, loop: Instruction) -> ProgramFacts:
        trips = trip_count(self.module, computation, loop)
        body = self.read_computation(loop.attribute("body") or "")
        return _times(body, trips)

    def _conditional(self, instruction: Instruction) -> ProgramFacts:
        read = [self.read_computation(name) for name in branches(instruction)]
        most = max(read, key=lambda branch: (branch.wire_bytes, branch.flops))
        return _scaled(most, fraction_taken(instruction))

    def read_collective(
        self, computation: Computation, instruction: Instruction, op: str
    ) -> Collective | None:
        """Return the collective that an instruction starts; None if it moves nothing."""
        if fused_collectives.continues_async_collective(computation, instruction):
            return None
        groups = parse_groups(instruction.rest, self.mesh.devices)
        axes = mesh_axes_of_groups(groups, self.mesh)
        shapes = computation.operand_shapes(instruction)
        if not axes or not shapes:
            return None  # a group of one device moves nothing
        moved = sent_shapes(op, shapes)
        is_permute = op == "collective-permute"
        devices = self.mesh.size(axes) if is_permute else len(groups[0])
        size = sum(nbytes(shape) for shape in moved) * (devices if op == "all-gather" else 1)
        if op == "all-reduce" and fused_collectives.is_reduce_scatter(computation, instruction):
            op = "reduce-scatter"
        scope, source = self.origins.locate(computation, instruction)
        return Collective(
            op=op.removeprefix("ragged-"),
            axes=axes,
            devices=devices,
            count=1,
            bytes=size,
            dtype=arrays(moved[0])[0][0],
            source=source,
            scope=scope,
            arrays=self.origins.arrays(computation, instruction, through_loops=is_permute),
            shapes=tuple(shape.partition("{")[0] for shape in moved),
            dimension=dimension_of(instruction),
            beside_tick=BESIDE_TICK in scope
            and has_compute_beside(
                computation,
                instruction,
                lambda each: self.read_instruction(computation, each).flops,
            ),
            decomposed_from=fused_collectives.collective_matmul_op(computation)
            if is_permute
            else "",
        )


def _sum(readings: Iterable[ProgramFacts]) -> ProgramFacts:
    collectives: list[Collective] = []
    flops, unknown, kernels, products = 0.0, 0, Counter[str](), Counter[str]()
    for each in readings:
        collectives += each.collectives
        flops += each.flops
        unknown += each.unknown_loops
        kernels.update(each.kernels)
        products.update(each.products)
    return ProgramFacts(tuple(collectives), flops, unknown, kernels, products=products)


def _times(body: ProgramFacts, trips: int | None) -> ProgramFacts:
    if trips is None:
        return dataclasses.replace(body, unknown_loops=body.unknown_loops + 1)
    inside = (dataclasses.replace(each, loops=(trips, *each.loops)) for each in body.collectives)
    return _scaled(dataclasses.replace(body, collectives=tuple(inside)), trips)


def _scaled(facts: ProgramFacts, times: int | Fraction) -> ProgramFacts:
    """Return what is done a number of times, or in a part of a loop's iterations."""
    return dataclasses.replace(
        facts,
        collectives=tuple(
            dataclasses.replace(each, count=each.count * times)
            for each in facts.collectives
            if times
        ),
        flops=facts.flops * float(times),
        kernels={name: count * times for name, count in facts.kernels.items()},
        products={name: count * times for name, count in facts.products.items()},
    )


def _in_whole_numbers(facts: ProgramFacts) -> ProgramFacts:
    """Return facts whose counts are whole: parts of loops that the compiler unrolled may not be."""
    counted = (dataclasses.replace(each, count=round(each.count)) for each in facts.collectives)
    return dataclasses.replace(
        facts,
        collectives=tuple(counted),
        kernels={name: round(count) for name, count in facts.kernels.items()},
        products={name: round(count) for name, count in facts.products.items()},
    )
