"""Groups of texts that share a prefix, so that computing it once for each costs least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from graphtrain.run.evaluation.continuation_scores import common_length
from graphtrain.run.serving.slots import MIN_COPY

_SEARCHED = 1000  # texts beyond the best group, after which it is taken


def prefix_groups(
    contexts: Sequence[tuple[int, ...]], sizes: Sequence[int], call_tokens: int
) -> Iterator[tuple[int, range]]:
    """Yield the length of a prefix, and which texts it is computed for once; each is in one group.

    A group is what costs least, compared with its texts one by one: of all texts that begin with
    the same few words, those of one subject, which share its examples. The last token of a context
    is in no prefix: its logits are needed.

    Args:
        contexts: What texts begin with, sorted.
        sizes: Number of tokens that each text takes by itself, with those of its context.
        call_tokens: Number of tokens whose computation takes as long as a call does beside them.
    """
    shared = [common_length(*pair) for pair in pairwise(contexts)]
    alone = begin = 0  # texts from `alone` to `begin` share no prefix
    while begin < len(contexts):
        prefix, end = _best_group(contexts, sizes, shared, begin, call_tokens)
        if prefix:
            if alone < begin:
                yield 0, range(alone, begin)
            yield prefix, range(begin, end)
            alone = end
        begin = end
    if alone < begin:
        yield 0, range(alone, begin)


def _best_group(
    contexts: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
    shared: Sequence[int],
    begin: int,
    call_tokens: int,
) -> tuple[int, int]:
    """Return the length of the prefix and the end of the group that begins with a text."""
    common, total = len(contexts[begin]) - 1, sizes[begin]
    best, cost = (0, begin + 1), 1.0
    for index in range(begin + 1, len(contexts)):
        common = min(common, shared[index - 1], len(contexts[index]) - 1)
        if common < MIN_COPY or index - best[1] > _SEARCHED:
            break
        total += sizes[index]
        count = index + 1 - begin
        part = (max(common, call_tokens) + total - count * common) / total
        if part < cost:
            best, cost = (common, index + 1), part
    return best
