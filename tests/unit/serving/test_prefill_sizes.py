"""Calls that process a prompt: by which programs, and with how much padding."""

from itertools import product

import pytest

from graphtrain.config.schema import Serve
from graphtrain.run.serving.prefill_sizes import next_size

SIZES = Serve().prefill


def calls(count: int, room: int, sizes: tuple[int, ...], call_tokens: int) -> list[int]:
    chosen = []
    while count > 0:
        chosen.append(next_size(count, room, sizes, call_tokens))
        count, room = count - chosen[-1], room - chosen[-1]
        assert room >= 0
    return chosen


def time(sizes: list[int], call_tokens: int) -> int:
    return sum(max(size, call_tokens) for size in sizes)


@pytest.mark.parametrize("call_tokens", [64, 256])
def test_no_other_calls_are_faster(call_tokens):
    sizes = (2, 5, 64, 200)
    for count in range(1, 200):
        mine = calls(count, 10_000, sizes, call_tokens)
        others = (
            others for n in (1, 2, 3) for others in product(sizes, repeat=n) if sum(others) >= count
        )
        best = min(others, key=lambda others: (time(list(others), call_tokens), len(others)))
        assert (time(mine, call_tokens), len(mine)) == (time(list(best), call_tokens), len(best))


def test_usual_prompts_have_little_padding():
    assert calls(300, 10_000, SIZES, 64) == [320]
    assert calls(1, 10_000, SIZES, 64) == [32]
    slower = [time(calls(count, 10_000, SIZES, 64), 64) / max(count, 64) for count in range(1, 513)]
    assert sum(slower) / len(slower) < 1.15


def test_padding_stays_in_the_room_there_is():
    for count in range(1, 1200):
        assert sum(calls(count, count + SIZES[0], SIZES, 256)) >= count
    assert calls(10**6, 10**6 + 32, SIZES, 64)[:2] == [512, 512]
