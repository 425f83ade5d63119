"""search: every strategy that a machine allows for a model and a batch, ranked by estimate.

Sizes that do not divide are never built; what does not fit memory is set aside with its reason. The
best are then compiled, and ranked again by what the compiler says they hold and send.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from graphtrain.config.schema import Mesh, Pipeline, Program
from graphtrain.estimates.memory import memory
from graphtrain.estimates.time import step_time, utilisation
from graphtrain.estimates.traffic import bubble_of, traffic
from graphtrain.planning.assessment import Memory, StepTime
from lowering.target import Target
from sharding_rules.errors import ShardingError
from sharding_rules.mesh import MeshShape
from sharding_rules.rules import Rules

_WIDEST_TENSOR = 64
_LONG = 8192  # positions, from which splitting them is considered
_REMATS: tuple[Literal["none", "dots", "full"], ...] = ("none", "dots", "full")
_OTHER_RULES = ("fsdp", "pipeline", "expert", "context", "tensor", "sequence")
_FAMILIES = ("tensor", "stage", "context", "expert", "fsdp", "remat", "rules")


@dataclass(frozen=True)
class Candidate:
    """One strategy and its estimate."""

    program: Program
    mesh: MeshShape
    memory: Memory
    time: StepTime
    mfu: float

    @property
    def seconds(self) -> float:
        return self.time.total

    def choice(self, family: str) -> str:
        """What it chose, of one of the families."""
        if family == "remat":
            return self.program.model.remat
        if family == "rules":
            return next((name for name in ("zero2", "zero1") if name in self.program.rules), "data")
        return str(self.mesh.axes.get(family, 1))

    @property
    def settings(self) -> dict[str, Any]:
        """What it changes in [program]."""
        pipeline = self.program.pipeline
        chosen: dict[str, Any] = {
            "mesh": {name: size for name, size in self.mesh.axes.items() if size > 1},
            "rules": list(self.program.rules),
            "microbatches": self.program.batch.microbatches,
            "remat": self.program.model.remat,
        }
        if self.mesh.axes.get("stage", 1) > 1:
            chosen["pipeline"] = {"schedule": pipeline.schedule, "rounds": pipeline.rounds}
        return chosen


@dataclass(frozen=True)
class Found:
    """What a search has looked at."""

    ranked: tuple[Candidate, ...]  # those that fit, fastest first
    lost: dict[str, str]  # by family, as "tensor 16": why its best member lost
    considered: int
    seconds: float


def search(program: Program, keep: int = 20) -> Found:
    """Rank the strategies for a program's model, batch and target; compiles nothing.

    Args:
        keep: how many to return.

    Raises:
        LoweringError: no such target.
    """
    began = time.perf_counter()
    fitting: list[Candidate] = []
    best_of: dict[tuple[str, str], Candidate] = {}
    considered = 0
    for candidate in candidates(program):
        considered += 1
        if candidate.memory.fits:
            fitting.append(candidate)
        for family in _FAMILIES:
            member = family, candidate.choice(family)
            if member not in best_of or _better(candidate, best_of[member]):
                best_of[member] = candidate
    fitting = list(rank(fitting))
    lost = _why_lost(fitting[0] if fitting else None, best_of)
    return Found(tuple(fitting[:keep]), lost, considered, time.perf_counter() - began)


def rank(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Those that fit first; then the faster; of equals, within 1 %, what holds less."""

    def order(one: Candidate) -> tuple[bool, int, int]:
        return not one.memory.fits, round(100 * math.log(one.seconds)), one.memory.peak

    return tuple(sorted(candidates, key=order))


def candidates(program: Program) -> Iterator[Candidate]:
    """Every strategy whose sizes divide, fitting or not."""
    devices = Target.parse(program.target).devices
    for mesh, rules in _meshes(program, devices):
        shape = MeshShape.resolve(vars(mesh), devices)
        table = _rules(rules)
        for variant in _variants(program, mesh, shape, rules):
            try:
                yield _candidate(variant, shape, table)
            except ShardingError:
                break  # sizes that do not divide; the variants have the same


@cache
def _rules(names: tuple[str, ...]) -> Rules:
    return Rules.load(names)


def _candidate(program: Program, mesh: MeshShape, rules: Rules) -> Candidate:
    held = memory(program, rules, mesh)
    collectives = traffic(program, rules, mesh)
    spent = step_time(program, mesh, held, collectives, bubble_of(program, mesh))
    return Candidate(program, mesh, held, spent, utilisation(program, spent.total))


def _meshes(program: Program, devices: int) -> Iterator[tuple[Mesh, tuple[str, ...]]]:
    model, batch = program.model, program.batch
    assert model.kv_heads
    long = batch.length >= _LONG
    for tensor in _divisors(devices, _WIDEST_TENSOR):
        if model.kv_heads % tensor or model.mlp % tensor or model.vocab % tensor:
            continue
        for stage in _divisors(devices // tensor, model.layers):
            for context in _divisors(devices // tensor // stage, 16 if long else 1):
                left = devices // tensor // stage // context
                for sizes in _copies(program, left):
                    mesh = Mesh(**sizes, stage=stage, context=context, tensor=tensor)
                    for first in ("data", "zero1", "zero2") if sizes["data"] > 1 else ("data",):
                        yield mesh, (first, *_OTHER_RULES)


def _copies(program: Program, devices: int) -> Iterator[dict[str, int]]:
    """What data, fsdp and expert can be, over which sequences are split."""
    mixture = program.model.mixture
    for expert in _divisors(devices, mixture.experts if mixture else 1):
        if mixture and mixture.experts % expert:
            continue
        for fsdp in _divisors(devices // expert, devices):
            data = devices // expert // fsdp
            if program.batch.sequences % devices == 0:
                yield {"data": data, "fsdp": fsdp, "expert": expert}


def _variants(
    program: Program, mesh: Mesh, shape: MeshShape, rules: tuple[str, ...]
) -> Iterator[Program]:
    """Microbatches, recomputation and schedules of one mesh."""
    copies, stages = shape.size(("data", "fsdp", "expert")), shape.axes["stage"]
    for microbatches in _divisors(program.batch.sequences // copies, 256):
        if microbatches % stages or (microbatches == 1 and "zero2" in rules):
            continue
        for remat in _REMATS:
            for pipeline in _pipelines(stages, program.model.layers):
                yield replace(
                    program,
                    mesh=mesh,
                    rules=rules,
                    model=replace(program.model, remat=remat),
                    batch=replace(program.batch, microbatches=microbatches),
                    pipeline=pipeline,
                )


def _pipelines(stages: int, layers: int) -> Iterator[Pipeline]:
    if stages == 1:
        yield Pipeline()
        return
    yield Pipeline(schedule="1f1b")
    for rounds in _divisors(layers // stages, 8):
        if layers % (stages * rounds) == 0:
            yield Pipeline(schedule="circular", rounds=rounds)


def _divisors(number: int, most: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]


def _better(one: Candidate, other: Candidate) -> bool:
    """Fitting before not fitting; then the faster, or the smaller where neither fits."""
    if one.memory.fits != other.memory.fits:
        return one.memory.fits
    if one.memory.fits:
        return rank((one, other))[0] is one
    return one.memory.peak < other.memory.peak


def _why_lost(
    winner: Candidate | None, best_of: dict[tuple[str, str], Candidate]
) -> dict[str, str]:
    reasons = {}
    for (family, choice), best in best_of.items():
        if winner is None or winner.choice(family) != choice:
            reasons[f"{family} {choice}"] = _reason(winner, best)
    return reasons


def _reason(winner: Candidate | None, best: Candidate) -> str:
    if not best.memory.fits:
        held = best.memory
        parts = {
            name: getattr(held, name)
            for name in ("parameters", "optimizer", "gradients", "activations", "temporaries")
        }
        largest = max(parts, key=lambda name: parts[name])
        return (
            f"nothing fits: at best {held.peak / 1e9:.1f} GB of {held.capacity / 1e9:.0f} GB, of "
            f"which {largest} {parts[largest] / 1e9:.1f} GB"
        )
    assert winner is not None
    if round(100 * math.log(best.seconds / winner.seconds)) < 1:
        return (
            f"as fast with {best.mesh}, but holds {best.memory.peak / 1e9:.1f} GB against "
            f"{winner.memory.peak / 1e9:.1f} GB"
        )
    name, more = _largest_excess(best.time, winner.time)
    return (
        f"at best {best.seconds:.3f} s a step against {winner.seconds:.3f} s, with {best.mesh}: "
        f"{name} takes {more:.3f} s longer"
    )


def _largest_excess(time: StepTime, other: StepTime) -> tuple[str, float]:
    """The part of a step that takes most longer than in another."""
    work, others = max(time.compute, time.memory), max(other.compute, other.memory)
    excess = {
        "compute": work - others,
        "the bubble": time.bubble - other.bubble,
        "communication that nothing hides": _exposed(time) - _exposed(other),
    }
    for axes, seconds in time.communication.items():
        excess.setdefault(f"communication over {axes}", 0.0)
        if not set(axes.split("+")) <= {"data", "fsdp"}:
            excess[f"communication over {axes}"] = seconds - other.communication.get(axes, 0.0)
    name = max(excess, key=lambda each: excess[each])
    return name, excess[name]


def _exposed(time: StepTime) -> float:
    return sum(time.communication.values()) - time.overlapped
