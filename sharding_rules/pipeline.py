"""Pipelines by arithmetic: which layers a stage holds, and what it does at every tick.

A chunk is what one stage computes in one round: chunk `round * stages + stage`, in the order that
a microbatch passes them. A tick is the time in which every stage works on one chunk.

Source: Huang et al. 2019, "GPipe", https://arxiv.org/abs/1811.06965; Narayanan et al. 2021, section
2.2, https://arxiv.org/abs/2104.04473 (1F1B, and interleaved stages, here called circular).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sharding_rules.errors import ShardingError

Schedule = Literal["gpipe", "circular", "1f1b"]


@dataclass(frozen=True)
class Stages:
    """The layers of a model, divided among the stages of a pipeline.

    All stages work in step, so a chunk takes as long, and as much memory, as the largest: shorter
    ones are filled with rows of zeros whose work is thrown away. Out of `rows`, `waste` are so.
    """

    stages: int
    rounds: int
    layers: tuple[int, ...]  # of each chunk

    @property
    def depth(self) -> int:
        """Rows that every chunk has, for layers or for zeros."""
        return max(self.layers)

    @property
    def rows(self) -> tuple[int | None, ...]:
        """The layer in every row of the stored arrays, chunk by chunk; None for zeros."""
        rows: list[int | None] = []
        first = 0
        for layers in self.layers:
            rows += [*range(first, first + layers), *[None] * (self.depth - layers)]
            first += layers
        return tuple(rows)

    @property
    def waste(self) -> float:
        """The part of all rows, and of a stage's work, that is zeros."""
        return 1 - sum(self.layers) / len(self.rows)


def divide_layers(
    layers: int, stages: int, rounds: int = 1, given: Sequence[int] | None = None
) -> Stages:
    """Give every chunk its layers: as given, or evenly.

    What does not divide leaves one layer less to the last chunk, which the head follows, then to
    the first, which the embedding precedes, and so on inwards.

    Raises:
        ShardingError: fewer layers than chunks, or given numbers that are not of this model.
    """
    chunks = stages * rounds
    where = f"{stages} stages" + (f" x {rounds} rounds" if rounds > 1 else "")
    if layers < chunks:
        raise ShardingError(
            f"{where} = {chunks} parts need at least as many layers; model.layers = {layers}"
        )
    if given is not None:
        if len(given) != chunks:
            raise ShardingError(f"pipeline.layers has {len(given)} numbers; {where} take {chunks}")
        if sum(given) != layers:
            raise ShardingError(
                f"pipeline.layers adds up to {sum(given)}, not to model.layers = {layers}"
            )
        return Stages(stages, rounds, tuple(given))
    depth = -(-layers // chunks)
    inwards = sorted(range(chunks), key=lambda chunk: (min(chunk, chunks - 1 - chunk), -chunk))
    short = set(inwards[: depth * chunks - layers])
    return Stages(stages, rounds, tuple(depth - (chunk in short) for chunk in range(chunks)))


def check_microbatches(microbatches: int, stages: int) -> None:
    """Refuse microbatches that leave stages idle: each stage embeds and scores as many.

    Raises:
        ShardingError: with the numbers nearby that would do.
    """
    if microbatches % stages:
        below = microbatches // stages * stages
        nearby = f"{below} or {below + stages}" if below else f"{stages}"
        raise ShardingError(
            f"batch.microbatches = {microbatches} is not a multiple of mesh.stage = {stages}; "
            f"set it to {nearby}, or to more for a smaller bubble"
        )


class Work(NamedTuple):
    """What a stage does at a tick."""

    stage: int
    tick: int
    kind: Literal["forward", "backward"]
    microbatch: int
    round: int


def ticks(schedule: Schedule, stages: int, rounds: int, microbatches: int) -> int:
    """Ticks of a step. One of 1f1b has time for a forward and a backward pass, those of the others
    for one of them."""
    if schedule == "1f1b":
        return microbatches + 2 * (stages - 1)
    return 2 * (microbatches * rounds + stages - 1)


def bubble(schedule: Schedule, stages: int, rounds: int, microbatches: int) -> float:
    """The part of a step in which a stage has nothing to do."""
    idle = 2 * (stages - 1)
    return idle / ticks(schedule, stages, rounds, microbatches)


def timeline(schedule: Schedule, stages: int, rounds: int, microbatches: int) -> list[Work]:
    """What every stage does at every tick of a training step, in order of ticks.

    Circular passes microbatches in groups of as many as there are stages: a group comes round when
    the first stage is done with it. Its backward passes are its forward passes in reverse.

    Args:
        schedule: As in [program.pipeline].
        stages: Devices along the mesh axis.
        rounds: Passes of a microbatch through all stages.
        microbatches: Of a step, a multiple of stages.
    """
    if schedule == "1f1b":
        work = list(_one_forward_one_backward(stages, microbatches))
    else:
        forward = list(_forward(stages, rounds, microbatches))
        last = ticks(schedule, stages, rounds, microbatches) - 1
        work = forward + [one._replace(tick=last - one.tick, kind="backward") for one in forward]
    return sorted(work, key=lambda one: (one.tick, one.stage, one.kind == "backward"))


def _forward(stages: int, rounds: int, microbatches: int) -> Iterator[Work]:
    for stage in range(stages):
        for slot in range(rounds * microbatches):
            group, within = divmod(slot, stages * rounds)
            microbatch = group * stages + within % stages
            yield Work(stage, slot + stage, "forward", microbatch, within // stages)


def _one_forward_one_backward(stages: int, microbatches: int) -> Iterator[Work]:
    for stage in range(stages):
        for microbatch in range(microbatches):
            yield Work(stage, microbatch + stage, "forward", microbatch, 0)
            back = 2 * (stages - 1) - stage
            yield Work(stage, microbatch + back, "backward", microbatch, 0)
