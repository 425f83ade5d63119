"""Work of a compiled CPU program: what its instructions multiply, compute and move in a step.

XLA:CPU runs one kernel for each instruction of the optimized program: a matrix product, a loop over
the elements of a fusion, a copy. Their sizes are the quantities of the CPU's time model; a profile
of the machine has the seconds of each (`graphtrain doctor --measure`).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from lowering.hlo.collectives import COLLECTIVE_OPS
from lowering.hlo.conditionals import branches, fraction_taken
from lowering.hlo.loop_work import LoopWork, fused_work, plain_work, rounding_reducers
from lowering.hlo.text import Computation, HloModule, Instruction, arrays, parse
from lowering.hlo.trip_counts import trip_count

# Instructions without a kernel.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "after-all",
    "partition-id", "replica-id",
}  # fmt: skip
_PARTITIONS = re.compile(r'"outer_dimension_partitions":\[([^\]]*)\]')
_KERNEL_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")
_INTEGER = re.compile(r"\d+")
Work = TypeVar("Work")


@dataclass(frozen=True)
class Product:
    """One matrix product on one device: `batch` products of rows x summed with summed x columns."""

    batch: int
    rows: int
    summed: int
    columns: int
    dtype: str  # of the operands, as in HLO: bf16, f32, s8

    @property
    def flops(self) -> float:
        """Operations; a multiply-add counts as two."""
        return 2.0 * self.batch * self.rows * self.summed * self.columns


@dataclass(frozen=True)
class ProgramWork:
    """Work of one device in one step, with the trip counts of loops included."""

    products: Mapping[Product, float]  # executions; of branches, the mean of a step
    loops: Mapping[LoopWork, float]
    launches: int  # kernels started, without collectives
    iterations: int  # of while loops
    arrays: int  # inputs and outputs of the program

    def to_record(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {
            "products": [[count, *vars(one).values()] for one, count in self.products.items()],
            "loops": [one.to_record() | {"count": count} for one, count in self.loops.items()],
            "launches": self.launches,
            "iterations": self.iterations,
            "arrays": self.arrays,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ProgramWork:
        """Return the work that a compiled program's record contains."""
        return cls(
            {Product(*sizes): count for count, *sizes in record["products"]},
            {LoopWork.from_record(loop): loop["count"] for loop in record["loops"]},
            record["launches"],
            record["iterations"],
            record["arrays"],
        )


def read_work(text: str) -> ProgramWork:
    """Read the work of an optimized program, as `compiled.as_text()` returns it on a CPU.

    A loop whose trip count is unknown counts once. A conditional counts as the branch with most
    work, in the iterations that its scope states (lowering/tracing/control_flow.py).
    """
    module = parse(text)
    reader = _Reader(module, rounding_reducers(module))
    reader.visit(module.entry, Fraction(1))
    entry = module.computations[module.entry]
    inputs = sum(one.opcode == "parameter" for one in entry.instructions.values())
    outputs = len(entry.instructions[entry.root].operands)
    return ProgramWork(
        _counts(reader.products),
        _counts(reader.loops),
        round(reader.launches),
        round(reader.iterations),
        inputs + outputs,
    )


class _Reader:
    """Sums of what computations do, each as often as it is executed."""

    def __init__(self, module: HloModule, rounding: Collection[str]) -> None:
        self.module = module
        self.rounding = rounding  # reducers, from rounding_reducers()
        self.products: dict[Product, Fraction] = defaultdict(Fraction)
        self.loops: dict[LoopWork, Fraction] = defaultdict(Fraction)
        self.launches = self.iterations = Fraction(0)

    def visit(self, name: str, times: Fraction) -> None:
        """Add what `times` executions of a computation do; parts of loops may not be whole."""
        computation = self.module.computations[name]
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if opcode == "while":
                trips = trip_count(self.module, computation, instruction) or 1
                self.iterations += times * trips
                self.visit(instruction.attribute("body") or "", times * trips)
            elif opcode == "conditional":
                most = max(branches(instruction), key=self._amount)
                self.visit(most, times * fraction_taken(instruction))
            elif opcode == "call":
                self.visit(instruction.attribute("to_apply") or "", times)
            elif opcode not in _FREE and opcode.removesuffix("-start") not in COLLECTIVE_OPS:
                self.launches += times
                self._add(computation, instruction, times)

    def _amount(self, name: str) -> tuple[float, float]:
        """Return the FLOPs and bytes of one execution of a branch, by which branches compare."""
        alone = _Reader(self.module, self.rounding)
        alone.visit(name, Fraction(1))
        flops = sum(one.flops * float(count) for one, count in alone.products.items())
        return flops, sum(one.bytes * float(count) for one, count in alone.loops.items())

    def _add(self, computation: Computation, instruction: Instruction, times: Fraction) -> None:
        fused = self.module.computations.get(instruction.attribute("calls") or "")
        inner = computation if fused is None else fused
        contained = [instruction] if fused is None else [*fused.instructions.values()]
        products = [
            _PRODUCTS[one.opcode](inner, one) for one in contained if one.opcode in _PRODUCTS
        ]
        for each in products:
            self.products[each] += times
        if not products:
            partitions = _partitions(instruction)
            if fused is not None:
                loop = fused_work(fused, partitions, self.rounding)
            else:
                loop = plain_work(computation, instruction, partitions, self.rounding)
            self.loops[loop] += times


def _counts(counts: Mapping[Work, Fraction]) -> dict[Work, float]:
    """Return counts as numbers of JSON; those of branches may not be whole."""
    return {
        work: count.numerator if count.denominator == 1 else float(count)
        for work, count in counts.items()
    }


def _partitions(instruction: Instruction) -> int:
    """Return the number of threads among which a kernel is divided; XLA's own kernels are not."""
    found = _PARTITIONS.search(instruction.rest)
    return math.prod(map(int, _INTEGER.findall(found[1]))) if found else 1


def product(computation: Computation, dot: Instruction) -> Product:
    """Return the sizes of a matrix product."""
    (left_dtype, left), (_, right) = (arrays(one)[0] for one in computation.operand_shapes(dot))
    batch = math.prod(left[index] for index in _dimensions(dot, "lhs_batch_dims"))
    summed = math.prod(left[index] for index in _dimensions(dot, "lhs_contracting_dims"))
    return Product(
        batch=batch,
        rows=math.prod(left) // max(1, batch * summed),
        summed=summed,
        columns=math.prod(right) // max(1, batch * summed),
        dtype=left_dtype,
    )


def convolution(computation: Computation, instruction: Instruction) -> Product:
    """Return the sizes of the product that a convolution is of the windows of its input."""
    (dtype, _), (_, kernel) = (arrays(one)[0] for one in computation.operand_shapes(instruction))
    labels = _KERNEL_LABELS.search(instruction.rest)
    features = kernel[labels[1].index("o")] if labels else 1
    outputs = math.prod(arrays(instruction.shape)[0][1])
    return Product(1, outputs // features, math.prod(kernel) // features, features, dtype)


_PRODUCTS = {"dot": product, "convolution": convolution}


def _dimensions(dot: Instruction, name: str) -> list[int]:
    found = re.search(rf"{name}=\{{([\d,]*)\}}", dot.rest)
    return [int(index) for index in _INTEGER.findall(found[1])] if found else []
