"""Layers of stages, and what the stages do at every tick."""

import pytest

from sharding_rules.errors import ShardingError
from sharding_rules.pipeline import (
    bubble_fraction,
    check_microbatches,
    cool_down_sums,
    divide_layers,
    pass_of,
    rows_of_periods,
    slot_of,
    stored_stage_inputs,
    tick_count,
)
from sharding_rules.timeline import timeline

ONE_F_ONE_B = [("1f1b", 4, 1, 8), ("1f1b", 2, 1, 2), ("1f1b", 4, 2, 8), ("1f1b", 3, 3, 3)]
SHAPES = [("gpipe", 4, 1, 8), ("circular", 4, 2, 8), ("circular", 2, 3, 4), *ONE_F_ONE_B]


@pytest.mark.parametrize(
    ("layers", "stages", "rounds", "of_chunks"),
    [
        (8, 4, 1, (2, 2, 2, 2)),
        (7, 4, 1, (2, 2, 2, 1)),
        (6, 4, 1, (1, 2, 2, 1)),
        (5, 4, 1, (1, 2, 1, 1)),
        (10, 2, 2, (2, 3, 3, 2)),
    ],
)
def test_what_does_not_divide_leaves_less_to_outer_chunks(layers, stages, rounds, of_chunks):
    assert divide_layers(layers, stages, rounds).layers == of_chunks


def test_rows_hold_layers_in_order_with_zeros_where_a_chunk_is_short():
    stages = divide_layers(4, 2, 1, given=(3, 1))
    assert stages.rows == (0, 1, 2, 3, None, None)
    assert stages.padding_fraction == pytest.approx(2 / 6)


@pytest.mark.parametrize(
    ("chunks", "count", "rows"),
    [
        ((4, 4), 4, (0, 1, 2, 3)),  # a period of 2
        ((4, 2), 4, (0, 1, 2, None)),
        ((4, 2), 8, (0, 1, 2, 3, 4, 5, None, None)),  # a period of 1
        ((4, 2), 2, None),  # no stage holds 2 of 4
        ((3, 2), 3, None),
        ((3, 3), 4, None),
    ],
)
def test_rows_of_layers_that_repeat_are_their_repetitions(chunks, count, rows):
    stages = divide_layers(sum(chunks), 2, 1, given=chunks)
    assert rows_of_periods(stages.rows, count) == rows
    if rows is not None:
        assert stages.in_periods(len(stages.rows) // count).rows == rows


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            (3, 4),
            r"mesh.stage = 4 requires at least 4 layers, but model.layers = 3; reduce mesh.stage",
        ),
        ((3, 2, 2), r"mesh.stage = 2 x pipeline.virtual_stages = 2 = 4 requires"),
        (
            (4, 2, 1, (4,)),
            r"pipeline.layers_per_stage has 1 numbers, but mesh.stage = 2 requires 2; remove",
        ),
        (
            (4, 2, 1, (2, 3)),
            r"the sum of pipeline.layers_per_stage is 5; it must be model.layers = 4",
        ),
    ],
)
def test_layers_that_stages_cannot_take_are_refused(arguments, words):
    with pytest.raises(ShardingError, match=words):
        divide_layers(*arguments)


@pytest.mark.parametrize(
    ("microbatches", "sequences", "advice"),
    [
        (6, 16, "set it to 4 or 8;"),
        (6, 12, "set it to 4 or 12;"),
        (1, 16, "set it to 4;"),
        (6, 4, "set it to 4;"),
        (6, 10, "choose mesh.stage among the divisors of batch.global_batch_size = 10"),
    ],
)
def test_microbatches_are_a_multiple_of_stages(microbatches, sequences, advice):
    with pytest.raises(ShardingError, match=rf"= {microbatches} is not a mul.*; {advice}"):
        check_microbatches(microbatches, 4, sequences)
    check_microbatches(8, 4, sequences)


@pytest.mark.parametrize("shape", SHAPES)
def test_bubble_is_the_part_of_a_timeline_without_work(shape):
    _, stages, *_ = shape
    work = timeline(*shape)
    slots = {(one.stage, one.tick) for one in work}
    assert len(slots) == len(work)  # no stage does two things at once
    assert max(one.tick for one in work) + 1 == tick_count(*shape[1:])
    room = stages * tick_count(*shape[1:])
    assert bubble_fraction(*shape[1:]) == pytest.approx(1 - len(work) / room)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_chunk_passes_every_microbatch_on_once_and_back_once(shape):
    _, stages, rounds, microbatches = shape
    work = timeline(*shape)
    done = {(one.kind, one.stage, one.microbatch, one.virtual_stage) for one in work}
    assert len(done) == len(work) == 2 * stages * rounds * microbatches


@pytest.mark.parametrize("shape", SHAPES)
def test_work_follows_what_it_needs_by_one_tick_or_more(shape):
    _, stages, _, _ = shape
    at = {
        (one.kind, one.virtual_stage * stages + one.stage, one.microbatch): one
        for one in timeline(*shape)
    }
    for (kind, chunk, microbatch), work in at.items():
        before = chunk - 1 if kind == "forward" else chunk + 1
        needed = at.get((kind, before, microbatch))
        if needed is not None:
            assert work.tick > needed.tick
        elif kind == "backward":  # of the last chunk
            assert work.tick > at["forward", chunk, microbatch].tick


@pytest.mark.parametrize("shape", ONE_F_ONE_B)
def test_all_stages_have_the_same_kind_of_pass_in_a_tick_of_1f1b(shape):
    kinds = {}
    for one in timeline(*shape):
        assert kinds.setdefault(one.tick, one.kind) == one.kind


@pytest.mark.parametrize("shape", ONE_F_ONE_B)
def test_1f1b_takes_the_published_time_whatever_a_backward_pass_takes(shape):
    """Narayanan et al. 2021, section 2.2: (p - 1) / (v m) of the ideal time."""
    _, stages, rounds, microbatches = shape
    seconds = {"forward": 1 / rounds, "backward": 3 / rounds}
    ticks = {one.tick: seconds[one.kind] for one in timeline(*shape)}
    ideal = microbatches * (1 + 3)
    assert sum(ticks.values()) / ideal - 1 == pytest.approx((stages - 1) / (rounds * microbatches))


@pytest.mark.parametrize("shape", ONE_F_ONE_B)
def test_1f1b_stores_the_inputs_of_the_warm_up_for_any_number_of_microbatches(shape):
    schedule, stages, rounds, _ = shape
    stored = {stage: 0 for stage in range(stages)}
    most = dict(stored)
    for one in timeline(schedule, stages, rounds, 8 * stages):
        stored[one.stage] += 1 if one.kind == "forward" else -1
        most[one.stage] = max(most[one.stage], stored[one.stage])
    assert most[0] == stored_stage_inputs(*shape) == stages * (rounds + 1) - 1
    assert all(most[stage] == most[0] - 2 * stage for stage in range(stages))


@pytest.mark.parametrize(("stages", "rounds"), [(4, 1), (4, 2), (3, 3)])
def test_a_pass_of_a_stage_is_found_by_its_number(stages, rounds):
    numbers = list(range(2 * stages * rounds))
    found = [pass_of(number, stages, rounds) for number in numbers]
    assert [slot_of(*one, stages, rounds) for one in found] == numbers
    assert len(set(found)) == len(numbers)


@pytest.mark.parametrize(
    ("stages", "rounds", "rows"),
    [(4, 2, 1), (4, 2, 4), (4, 2, 5), (2, 3, 3), (3, 3, 7), (2, 4, 1), (8, 3, 20), (4, 1, 3)],
)
def test_the_last_ticks_sum_gradients_that_are_complete_on_all_stages(stages, rounds, rows):
    sums, end = cool_down_sums(stages, rounds, rows), tick_count(stages, rounds, 2 * stages)
    completed = dict.fromkeys(range(rounds), 0)  # by round: its last tick on any stage
    for one in timeline("1f1b", stages, rounds, 2 * stages):
        completed[one.virtual_stage] = max(completed[one.virtual_stage], one.tick)
    row = rounds * rows  # of all rounds, the first that is summed
    for tick in range(end - sums.ticks, end):
        row -= sums.rows_per_tick
        assert completed[row // rows] < tick
    assert (
        0 <= row - rows < sums.rows_per_tick
    )  # after the last tick, with those of the first round
    assert sums.rows + row == rounds * rows
