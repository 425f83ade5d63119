"""Sizes of the calls that process a prompt, among those that programs are compiled for."""

import functools

# Below about so many tokens, a call takes the time in which the weights are read. On two cores, a
# model of 125M parameters takes 64 ms for 64 tokens and 1.1 ms for each further one.
CALL_TOKENS = {"cpu": 64, "others": 256}


def next_size(count: int, room: int, sizes: tuple[int, ...], call_tokens: int) -> int:
    """Return the size of the first call of those that process `count` tokens soonest.

    The time of a call is taken to be that of its size, padding included, or of `call_tokens`.

    Args:
        count: Number of tokens that are left of a prompt.
        room: Number of positions that the KV cache has for them, with padding.
        sizes: Sizes of the programs, increasing.
        call_tokens: Number of tokens up to which a call takes the same time.
    """
    return _cheapest(count, min(room, count + sizes[-1]), sizes, call_tokens)[2]


@functools.lru_cache(maxsize=4096)
def _cheapest(
    count: int, room: int, sizes: tuple[int, ...], call_tokens: int
) -> tuple[int, int, int]:
    """Return the tokens' time and the number of calls from here on, and the size of the first."""
    fitting = [size for size in sizes if size <= room]
    if count >= 2 * fitting[-1]:  # of a long prompt, only the end is worth a search
        return 0, 0, fitting[-1]

    def with_first(size: int) -> tuple[int, int, int]:
        time, calls = max(size, call_tokens), 1
        if size < count:
            later, more, _ = _cheapest(count - size, room - size, sizes, call_tokens)
            time, calls = time + later, calls + more
        return time, calls, size

    return min(map(with_first, fitting))
