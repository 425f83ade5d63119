"""Timeline of a pipeline's schedule: the work of each stage at every tick."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from sharding_rules.pipeline import Schedule, one_f_one_b_phases, pass_of, tick_count


class TickWork(NamedTuple):
    """Work of one stage at one tick."""

    stage: int
    tick: int
    kind: Literal["forward", "backward"]
    microbatch: int
    virtual_stage: int


def timeline(schedule: Schedule, stages: int, rounds: int, microbatches: int) -> list[TickWork]:
    """Return the work of every stage at every tick of a training step, in order of ticks.

    In the circular schedule and in GPipe, the backward passes are the forward passes in reverse
    order. In 1F1B they begin as early as they can.

    Args:
        schedule: Name of the schedule, as in [program.pipeline].
        stages: Number of stages, which is the size of the mesh axis.
        rounds: Number of chunks of each stage.
        microbatches: Number of microbatches in a step, a multiple of stages.
    """
    if schedule == "1f1b":
        ticks = list(_one_f_one_b(stages, rounds, microbatches))
    else:
        forward = list(_forward(stages, rounds, microbatches))
        last = tick_count(stages, rounds, microbatches) - 1
        ticks = forward + [
            tick_work._replace(tick=last - tick_work.tick, kind="backward") for tick_work in forward
        ]
    return sorted(ticks, key=lambda tick_work: (tick_work.tick, tick_work.stage))


def _forward(stages: int, rounds: int, microbatches: int) -> Iterator[TickWork]:
    for stage in range(stages):
        for slot in range(rounds * microbatches):
            microbatch, turn = pass_of(slot, stages, rounds)
            yield TickWork(stage, slot + stage, "forward", microbatch, turn)


def _one_f_one_b(stages: int, rounds: int, microbatches: int) -> Iterator[TickWork]:
    alone, both, _ = one_f_one_b_phases(stages, rounds, microbatches)
    for work in _forward(stages, rounds, microbatches):
        late = max(0, work.tick - alone)  # passes in the phase of both
        yield work._replace(tick=work.tick + late)
        # The backward passes of a stage are its forward passes with stages and rounds mirrored.
        yield TickWork(
            stages - 1 - work.stage,
            alone + work.tick + min(work.tick + 1, both),
            "backward",
            work.microbatch,
            rounds - 1 - work.virtual_stage,
        )
