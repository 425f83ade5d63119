"""Pipeline schedules: the layers of each stage, and the work of each stage at every tick.

A chunk is the group of layers that one stage computes in one round (a virtual stage). A microbatch
passes the chunks in the order of their index, `round * stages + stage`. A tick is the time in which
every stage computes one chunk in one direction.

Source: Huang et al. 2019, "GPipe", https://arxiv.org/abs/1811.06965; Narayanan et al. 2021, section
2.2, https://arxiv.org/abs/2104.04473 (1F1B, and interleaved stages).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from sharding_rules.errors import ShardingError
from sharding_rules.mesh import MeshShape
from sharding_rules.rules import Rules

Schedule = Literal["gpipe", "circular", "1f1b"]
Number = Any  # an int, or an array of them
LayerRows = tuple[int | None, ...]  # the layer in each row; None for a padding row


@dataclass(frozen=True)
class Stages:
    """Assignment of a model's layers to the stages of a pipeline.

    All stages work in lockstep, so every chunk takes the time and memory of the largest one.
    Smaller chunks are padded with rows of zeros, whose results are discarded.
    """

    stages: int
    rounds: int
    layers: tuple[int, ...]  # number of layers of each chunk

    @property
    def rows_per_chunk(self) -> int:
        """Number of rows of every chunk, including padding."""
        return max(self.layers)

    @property
    def rows(self) -> LayerRows:
        """Layer in each row of the stacked arrays, chunk by chunk; None for padding."""
        rows: list[int | None] = []
        first_layer = 0
        for layers in self.layers:
            rows += [
                *range(first_layer, first_layer + layers),
                *[None] * (self.rows_per_chunk - layers),
            ]
            first_layer += layers
        return tuple(rows)

    @property
    def padding_fraction(self) -> float:
        """Fraction of all rows, and of a stage's work, that is padding."""
        return 1 - sum(self.layers) / len(self.rows)

    def in_periods(self, period: int) -> "Stages":
        """Return the assignment of repetitions of `period` layers, of which chunks hold whole ones.

        An array that stacks the layers at one position of the period has a row for each repetition.
        """
        return replace(self, layers=tuple(layers // period for layers in self.layers))


def rows_of_periods(rows: LayerRows, count: int) -> LayerRows | None:
    """Return the repetition in each of `count` rows that each stand for as many layers.

    Args:
        rows: layer in each row of an array that stacks all layers.
        count: number of rows of an array that stacks the layers at one position of a period.

    Returns:
        None if no period gives so many rows.
    """
    period, rest = divmod(len(rows), max(count, 1))
    if rest or not period:
        return None
    groups = [rows[start : start + period] for start in range(0, len(rows), period)]
    found = tuple(None if group[0] is None else group[0] // period for group in groups)
    whole = [
        (None,) * period if number is None else tuple(range(number * period, (number + 1) * period))
        for number in found
    ]
    return found if whole == groups else None


def divide_layers(
    layers: int, stages: int, rounds: int = 1, given: Sequence[int] | None = None
) -> Stages:
    """Assign layers to chunks, evenly or as given.

    If the layers do not divide evenly, the last chunk (followed by the LM head) has one layer less,
    then the first (preceded by the embedding), and so on inwards.

    Args:
        layers: number of layers of the model.
        stages: number of pipeline stages.
        rounds: chunks of each stage.
        given: number of layers of each chunk; None for an even division.

    Raises:
        ShardingError: there are fewer layers than chunks, or `given` does not fit the model.
    """
    chunks = stages * rounds
    layout = f"mesh.stage = {stages}"
    if rounds > 1:
        layout = f"{layout} x pipeline.virtual_stages = {rounds} = {chunks}"
    if layers < chunks:
        smaller = " or pipeline.virtual_stages" if rounds > 1 else ""
        raise ShardingError(
            f"{layout} requires at least {chunks} layers, but model.layers = {layers}; reduce "
            f"mesh.stage{smaller}"
        )
    if given is not None:
        if len(given) != chunks:
            raise ShardingError(
                f"pipeline.layers_per_stage has {len(given)} numbers, but {layout} requires "
                f"{chunks}; remove it, or change one of them"
            )
        if sum(given) != layers:
            raise ShardingError(
                f"the sum of pipeline.layers_per_stage is {sum(given)}; it must be model.layers = "
                f"{layers}"
            )
        return Stages(stages, rounds, tuple(given))
    depth = -(-layers // chunks)
    outermost_first = sorted(
        range(chunks), key=lambda chunk: (min(chunk, chunks - 1 - chunk), -chunk)
    )
    shorter_chunks = set(outermost_first[: depth * chunks - layers])
    return Stages(
        stages, rounds, tuple(depth - (chunk in shorter_chunks) for chunk in range(chunks))
    )


_TRIED = 10_000  # numbers of microbatches, for advice


def check_microbatches(microbatches: int, stages: int, sequences: int) -> None:
    """Check that the number of microbatches is a multiple of the number of stages.

    Each stage embeds, and computes the loss of, equally many microbatches.

    Args:
        microbatches: Of a step.
        stages: Of the pipeline.
        sequences: Of a step, which the microbatches divide.

    Raises:
        ShardingError: it is not; the message contains the nearest valid numbers.
    """
    if microbatches % stages == 0:
        return
    below = min(microbatches, sequences) // stages * stages
    fewer = range(below, 0, -stages)[:_TRIED]
    more = range(below + stages, sequences + 1, stages)[:_TRIED]
    nearest = [
        count
        for counts in (fewer, more)
        if (count := next((one for one in counts if sequences % one == 0), None))
    ]
    advice = f"choose mesh.stage among the divisors of batch.global_batch_size = {sequences}"
    if nearest:
        advice = f"set it to {' or '.join(map(str, nearest))}; more have a smaller bubble"
    raise ShardingError(
        f"batch.microbatches = {microbatches} is not a multiple of mesh.stage = {stages}; {advice}"
    )


class WeightCopies(NamedTuple):
    """Mesh axes along which the weights of a pipeline's stages are only replicated."""

    batch: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.batch, *self.positions)


def weight_copies(rules: Rules, mesh: MeshShape, schedule: Schedule, seq_len: int) -> WeightCopies:
    """Return the mesh axes over which gradients can be summed once, after a pipeline's last tick.

    Positions are among them with ring attention alone, and with 1f1b where the stages can share the
    loss of each device's positions.
    """
    weight_axes = {name for names in rules.parameters.values() for name in names}

    def split(axis: str) -> tuple[str, ...]:
        names = rules.activations.get(axis, ())
        return tuple(name for name in names if mesh.axes.get(name, 1) > 1)

    batch = tuple(name for name in split("batch") if name not in weight_axes)
    ring = split("kv_seq")
    is_shared = schedule != "1f1b" or seq_len % mesh.size((*split("stages"), *ring)) == 0
    replicates = ring == split("seq") and weight_axes.isdisjoint(ring)
    return WeightCopies(batch, ring if replicates and is_shared else ())


class Phases(NamedTuple):
    """Lengths of the three phases of 1F1B, in passes of a stage in one direction."""

    forward: int  # before the first backward pass of any stage: forward passes only
    both: int  # a forward and a backward pass each
    backward: int  # after the last forward pass: backward passes only

    @property
    def ticks(self) -> tuple[range, range, range]:
        """Numbers of the passes of each phase; one of the phase of both is two passes."""
        begins = self.forward, self.forward + self.both
        return range(begins[0]), range(*begins), range(begins[1], sum(self))


def one_f_one_b_phases(stages: int, rounds: int, microbatches: int) -> Phases:
    """Return the phases of 1F1B.

    All stages compute the same kinds of passes in a phase, so a step takes `microbatches * rounds +
    stages - 1` forward and as many backward passes of a chunk: the published time.
    """
    alone = stages * rounds - 1
    return Phases(alone, microbatches * rounds - alone + stages - 1, alone)


class CoolDownSums(NamedTuple):
    """Layer rows of a stage whose gradients the last ticks of 1F1B sum over copies of the weights.

    They are the last ones of all rounds, and are summed in descending order. The others are summed
    after the last tick.
    """

    rows_per_tick: int
    ticks: int  # the last ones of a step

    @property
    def rows(self) -> int:
        return self.rows_per_tick * self.ticks


def cool_down_sums(stages: int, rounds: int, rows_per_chunk: int) -> CoolDownSums:
    """Return which gradients interleaved 1F1B sums beside its last backward passes.

    The gradients of round r are complete on all stages `stages * r` ticks before the end. So the
    ticks can sum those of all rounds but the first, each as few rows as suffice. With one round
    there are none: the first stage ends its last backward pass in the last tick.

    Source: Li et al. 2023, "Fold3D", IEEE Transactions on Parallel and Distributed Systems 34(5),
    https://doi.org/10.1109/TPDS.2023.3247883
    """
    rows_per_tick = -(-rows_per_chunk // stages)
    return CoolDownSums(rows_per_tick, (rounds - 1) * rows_per_chunk // rows_per_tick)


def stored_stage_inputs(schedule: Schedule, stages: int, rounds: int, microbatches: int) -> int:
    """Return the number of chunk inputs that a stage has room for, until their backward pass.

    1F1B stores as many as the first stage computes before its first backward pass, which is the
    number of Megatron-LM's interleaved schedule.
    """
    if schedule == "1f1b":
        return stages * (rounds + 1) - 1
    return microbatches * rounds


def slot_of(microbatch: Number, turn: Number, stages: int, rounds: int) -> Number:
    """Return the position of a chunk's pass among the passes of its stage, from 0.

    Groups of as many microbatches as stages pass all rounds one after the other.

    Args:
        microbatch: Index of the microbatch; an int or an array, as the result.
        turn: Round of the chunk in the order of execution: backward passes begin with the last.
        stages: Number of stages.
        rounds: Number of chunks of each stage.
    """
    return (microbatch // stages * rounds + turn) * stages + microbatch % stages


def pass_of(slot: Number, stages: int, rounds: int) -> tuple[Number, Number]:
    """Return microbatch and turn of a stage's pass; the inverse of slot_of."""
    group, within = slot // (stages * rounds), slot % (stages * rounds)
    return group * stages + within % stages, within // stages


def tick_count(stages: int, rounds: int, microbatches: int) -> int:
    """Return the number of ticks of a step, of any schedule.

    A tick is the time of a forward or of a backward pass of a chunk.
    """
    return 2 * (microbatches * rounds + stages - 1)


def bubble_fraction(stages: int, rounds: int, microbatches: int) -> float:
    """Return the fraction of a step in which a stage is idle (pipeline bubble), of any schedule.

    Of the time without a bubble this is (stages - 1) / (rounds * microbatches).
    """
    return 2 * (stages - 1) / tick_count(stages, rounds, microbatches)
