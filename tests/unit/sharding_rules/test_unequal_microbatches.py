"""Why all microbatches have one size: what unequal ones take, in lockstep and in stages apart."""

from itertools import combinations, pairwise

import pytest

from sharding_rules.timeline import timeline

# Sequences of each microbatch in AscendSpeed's two examples, and their number of stages.
# Source: _initialize_optimized_pipeline, https://github.com/Ascend/AscendSpeed
FOUR_STAGES = 4, (1, 2, 3, 4, *[5] * 9, 4, 3, 2)
EIGHT_STAGES = 8, (1, 2, 2, 3, 4, *[5] * 13, 4, 4, 3, 3, 3, 2)
SECONDS = {"forward": 1, "backward": 2}  # of a sequence


def in_lockstep(shape, sizes):
    """Seconds of a step in which all stages wait for the largest microbatch of each tick."""
    _, _, rounds, _ = shape
    ticks = {}
    for one in timeline(*shape):
        seconds = sizes[one.microbatch] * SECONDS[one.kind] / rounds
        ticks[one.tick] = max(ticks.get(one.tick, 0), seconds)
    return sum(ticks.values())


def apart(stages, sizes, seconds):
    """Seconds of a step of 1F1B in which a stage waits only for what its pass needs."""
    count, waiting, ends, clocks = len(sizes), {}, {}, [0.0] * stages
    for stage in range(stages):
        early = stages - 1 - stage
        both = [one for i in range(count) for one in (("F", early + i), ("B", i))]
        passes = [*(("F", i) for i in range(early)), *both]
        waiting[stage] = [one for one in passes if one[1] < count]
    while any(waiting.values()):
        for stage, passes in waiting.items():
            while passes and (begin := _begin(stage, stages, passes[0], ends)) is not None:
                kind, index = passes.pop(0)
                took = sizes[index] * seconds["forward" if kind == "F" else "backward"]
                clocks[stage] = ends[kind, stage, index] = max(clocks[stage], begin) + took
    return max(clocks)


def _begin(stage, stages, one, ends):
    """When what a pass needs is there; None if it is not yet."""
    kind, index = one
    if kind == "F":
        return ends.get(("F", stage - 1, index)) if stage else 0.0
    return ends.get(("B", stage + 1, index) if stage < stages - 1 else ("F", stage, index))


def equal(sizes):
    return (sum(sizes) / len(sizes),) * len(sizes)


@pytest.mark.parametrize(
    ("example", "seconds", "less_bubble", "less_time"),
    [
        (FOUR_STAGES, SECONDS, 0.306, 0.048),
        (FOUR_STAGES, SECONDS | {"backward": 3}, 0.1875, 0.030),  # "near 20%": with recomputation
        (EIGHT_STAGES, SECONDS, 0.238, 0.054),
    ],
)
def test_stages_of_programs_of_their_own_gain_by_small_outer_microbatches(
    example, seconds, less_bubble, less_time
):
    stages, sizes = example
    ideal = sum(sizes) * sum(seconds.values())
    unequal, same = apart(stages, sizes, seconds), apart(stages, equal(sizes), seconds)
    assert same - ideal == pytest.approx((stages - 1) * ideal / len(sizes))  # the published bubble
    assert 1 - (unequal - ideal) / (same - ideal) == pytest.approx(less_bubble, abs=1e-3)
    assert 1 - unequal / same == pytest.approx(less_time, abs=1e-3)


@pytest.mark.parametrize(
    ("example", "more_time"), [(FOUR_STAGES, 79 / 76), (EIGHT_STAGES, 131 / 124)]
)
def test_in_one_program_they_take_longer_than_equal_ones(example, more_time):
    stages, sizes = example
    shape = "1f1b", stages, 1, len(sizes)
    took = in_lockstep(shape, sizes) / in_lockstep(shape, equal(sizes))
    assert took == pytest.approx(more_time)


@pytest.mark.parametrize(
    ("schedule", "stages", "rounds"),
    [("gpipe", 2, 1), ("gpipe", 4, 1), ("1f1b", 4, 1), ("circular", 2, 2), ("1f1b", 2, 2)],
)
def test_no_sizes_of_a_batch_take_less_than_equal_ones_in_one_program(schedule, stages, rounds):
    batch, count = 12, 4
    shape = schedule, stages, rounds, count
    least = in_lockstep(shape, equal((batch // count,) * count))
    assert least == pytest.approx(3 * (batch + (stages - 1) * batch / count / rounds))
    for cuts in combinations(range(1, batch), count - 1):
        sizes = tuple(end - begin for begin, end in pairwise((0, *cuts, batch)))
        assert in_lockstep(shape, sizes) >= least - 1e-9
