"""assess: what a training step holds, sends and takes, from the compiler wherever it can be asked.

The training step is compiled through the cache, by the keys that `graphtrain compile` uses: a plan
of what is compiled costs nothing, and what a plan compiled is there for the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graphtrain.cache import Cache
from graphtrain.compile import Observer, Outcome, Task, compile_tasks
from graphtrain.config.schema import Program
from graphtrain.errors import PlanError
from graphtrain.planning.assessment import Assessment, Memory
from graphtrain.requests import request_keys
from lowering.collectives import Collective


def assess(
    program: Program,
    cache: Cache,
    *,
    compile: bool = True,
    observe: Observer = lambda label, stage: None,
) -> Assessment:
    """Assess one program; as assess_all."""
    return assess_all({"train": program}, cache, compile=compile, observe=observe)["train"]


def assess_all(
    programs: Mapping[str, Program],
    cache: Cache,
    *,
    compile: bool = True,
    jobs: int | None = None,
    observe: Observer = lambda label, stage: None,
) -> dict[str, Assessment]:
    """Assess programs by label, their compilations in parallel.

    A target that cannot be compiled for here is estimated, with a remark that says what to install;
    with compile false, all are. That a program does not fit is an answer, not an error.

    Args:
        jobs: compilers at once; as many as there are cores if None.

    Raises:
        LoweringError: no such target.
        PlanError: a program cannot be traced.
        ShardingError: an array cannot be placed.
    """
    from graphtrain.estimates import estimate  # imports the model

    estimates = {label: estimate(program) for label, program in programs.items()}
    if not compile:
        return estimates
    tasks = [
        Task(label, program, "train", request_keys(program)["train"])
        for label, program in programs.items()
    ]
    report = compile_tasks(tasks, cache, jobs=jobs, observe=observe)
    requests = {task.label: task.request for task in tasks}
    assessments = {}
    for outcome in report.outcomes:
        label = outcome.label
        artifact = cache.find(requests[label]) if outcome.digest else None
        if artifact is not None:
            assessments[label] = compiled(programs[label], estimates[label], artifact.record)
        else:
            assessments[label] = _not_compiled(estimates[label], outcome)
    return assessments


def compiled(program: Program, estimated: Assessment, record: Mapping[str, Any]) -> Assessment:
    """What the record of a compiled training step says, and an estimate of what it does not."""
    collectives = tuple(map(Collective.from_record, record["collectives"]))
    loops = record["unknown_loops"]
    remark = (
        f"{loops} loops have no trip count in the compiled text; what they send counts once"
        if loops
        else ""
    )
    return replace(
        timed(program, estimated, collectives, record),
        memory=_counted(estimated.memory, record["memory"]["peak"]),
        compile_seconds=record["compile_seconds"],
        remark=remark,
    )


def timed(
    program: Program,
    estimated: Assessment,
    collectives: tuple[Collective, ...],
    record: Mapping[str, Any],
) -> Assessment:
    """The assessment with the roofline of what was compiled."""
    from graphtrain.estimates import step_time

    time, mfu = step_time(program, collectives, record.get("flops"))
    return replace(
        estimated, collectives=collectives, collectives_source="compiler", time=time, mfu=mfu
    )


def _counted(estimated: Memory, peak: int) -> Memory:
    """The compiler's peak, divided: of what it does not name, the estimate as far as there is room.

    Parameters and optimizer state are exact, by the placement of every array.
    """
    room = peak - estimated.parameters - estimated.optimizer
    gradients = max(0, min(estimated.gradients, room))
    activations = max(0, min(estimated.activations, room - gradients))
    return replace(
        estimated,
        gradients=gradients,
        activations=activations,
        temporaries=max(0, room - gradients - activations),
        peak=peak,
        source="compiler",
    )


def _not_compiled(estimated: Assessment, outcome: Outcome) -> Assessment:
    """The estimate, with why there is no compiled program.

    Raises:
        PlanError: the settings cannot be traced.
    """
    error = outcome.error or "the compiled program was removed from the store meanwhile"
    if outcome.reason == "settings":
        raise PlanError(error)
    if outcome.reason != "memory":
        where = f"; its StableHLO and log: {outcome.failure}" if outcome.reason == "defect" else ""
        return replace(estimated, remark=f"not compiled: {error}{where}")
    memory = estimated.memory
    # The compiler need not say how much is missing, but it has looked.
    needed = max(outcome.needed_bytes or 0, memory.peak, memory.capacity + 1)
    return replace(estimated, memory=_counted(memory, needed), remark=error)
