"""Rolling buffers of layers with a sliding window: what is written, attended to and reused."""

import functools
import random
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from graphtrain.models.attention.cache_layout import CachedLayer, CacheLayout, CacheSize
from graphtrain.models.attention.cached import attend_to_cache
from graphtrain.models.attention.kv_cache import (
    CacheRows,
    LayerCache,
    continue_rows,
    layer_cache_specs,
)
from graphtrain.models.attention.score_mods import ScoreTransform
from graphtrain.run.serving.written_positions import WrittenPositions
from lowering.machine.target import Target
from lowering.tracing.current_target import trace_for_target

SLOTS, CONTEXT, HEADS, KV_HEADS, HEAD_DIM = 3, 120, 4, 2, 4
SIZES = (4, 16)  # of the programs that process a prompt
SCORING = ScoreTransform(0.5, cap=3.0)
LAYOUTS = {
    "dot": CacheLayout("bhdk", "bhkd", 8, "rows"),
    "scatter": CacheLayout("hbkd", "hbkd", 8, "scatter"),
    "loop": CacheLayout("hbkd", "hbkd", 8, "loop"),
}


class Sequences:
    """Sequences in slots: their tokens' queries, keys and values, and the cache of one layer."""

    def __init__(self, layout: CacheLayout, window: int, is_cpu: bool, seed: int) -> None:
        self.window, self.layout, self.is_cpu = window, layout, is_cpu
        size = CacheSize(CONTEXT, SIZES[0], SIZES[-1], layout)
        layer = CachedLayer(KV_HEADS, HEAD_DIM, window)
        self.positions = size.positions(window)
        # What was there before is no number that may count.
        specs = layer_cache_specs(layer, SLOTS, size, "float32")
        self.cache = {name: jnp.full(spec.shape, 1e3) for name, spec in specs.items()}
        self.held: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(SLOTS)]
        self.next = [0] * SLOTS  # position at which a slot that is not active writes
        self.written = WrittenPositions(SLOTS, CONTEXT, SIZES[-1], self.positions)
        self._draw = np.random.default_rng(seed)
        self._compiled = functools.cache(self._compile)

    def prefill(self, slot: int, offset: int, count: int) -> None:
        size = next(size for size in SIZES if size >= count)
        arrays = [self._arrays(1, size, heads) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        del self.held[slot][offset:]
        self.held[slot] += zip(*(array[0, :count] for array in arrays[1:]), strict=True)
        got = self._run(arrays, [offset], slot)
        self.next[slot] = offset + count
        self.written.prefill(slot, offset, count, size)
        for index in range(count):
            self._check(got[0, index], arrays[0][0, index], slot, offset + index)

    def decode(self, active: list[int]) -> None:
        arrays = [self._arrays(SLOTS, 1, heads) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        got = self._run(arrays, self.next, None)
        for slot in active:
            self.held[slot].append((arrays[1][slot, 0], arrays[2][slot, 0]))
            self._check(got[slot, 0], arrays[0][slot, 0], slot, self.next[slot])
            self.next[slot] += 1
            self.written.decode(slot, 1)

    def copy(self, source: int, destination: int, length: int) -> None:
        slots = {"key": self.layout.key.index("b"), "value": self.layout.value.index("b")}
        self.cache = {
            name: jnp.moveaxis(
                (moved := jnp.moveaxis(array, slots[name], 0)).at[destination].set(moved[source]),
                0,
                slots[name],
            )
            for name, array in self.cache.items()
        }
        self.held[destination] = self.held[source][:length]
        self.next[destination] = self.next[source]
        self.written.copy(source, destination)

    def _arrays(self, batch: int, length: int, heads: int) -> np.ndarray:
        return self._draw.standard_normal((batch, length, heads, HEAD_DIM)).astype(np.float32)

    def _run(self, arrays: list[np.ndarray], offsets: list[int], slot: int | None) -> np.ndarray:
        place = None if slot is None else np.int32(slot)
        compiled = self._compiled(arrays[0].shape)
        output, self.cache = compiled(self.cache, arrays, np.array(offsets, np.int32), place)
        return np.asarray(output)

    def _compile(self, shape: tuple[int, ...]):
        del shape  # one function for each, so that each is compiled once

        def attend(cache, arrays, offsets, slot):
            rows, layer = CacheRows(offsets, CONTEXT, slot, self.layout), LayerCache(**cache)
            target = trace_for_target(Target.parse("cpu:1")) if self.is_cpu else nullcontext()
            with target, continue_rows(rows):
                output = attend_to_cache(layer, *arrays, SCORING, self.window)
            return output, {"key": layer.key, "value": layer.value}

        return jax.jit(attend)

    def _check(self, got: np.ndarray, query: np.ndarray, slot: int, position: int) -> None:
        """Compare with one head at a time, over what the sequence has in its window."""
        seen = self.held[slot][max(0, position - self.window + 1) : position + 1]
        for head in range(HEADS):
            keys, values = (
                np.stack([one[part][head // (HEADS // KV_HEADS)] for one in seen])
                for part in (0, 1)
            )
            scores = 3 * np.tanh(keys.astype(np.float64) @ query[head] * 0.5 / 3)
            weights = np.exp(scores - scores.max())
            want = weights @ values / weights.sum()
            np.testing.assert_allclose(got[head], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_cpu", [True, False], ids=["in blocks", "at once"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [1, 9])
def test_sequences_that_come_go_and_share_prefixes_see_their_own_window(window, layout, is_cpu):
    source = random.Random(window)
    sequences = Sequences(LAYOUTS[layout], window, is_cpu, seed=window)
    assert sequences.positions == -(-(window + 15) // 8) * 8 < CONTEXT
    done = dict.fromkeys(("decode", "prefill", "restart", "in place", "copy", "refused"), 0)
    for _ in range(200):
        slot, length = source.randrange(SLOTS), 0
        chance, held = source.random(), len(sequences.held[slot])
        if chance < 0.5:
            growing = [slot for slot in range(SLOTS) if 0 < sequences.next[slot] < CONTEXT]
            continuing = [s for s in growing if len(sequences.held[s]) == sequences.next[s]]
            sequences.decode([s for s in continuing if source.random() < 0.7])
            done["decode"] += 1
            continue
        action = source.choice(["prefill", "restart", "in place", "copy"])
        if action in ("in place", "copy"):
            length = source.randint(max(0, held - 40), held)
            if not sequences.written.can_reuse(slot, length):
                done["refused"] += 1
                continue
        if action == "copy":
            origin, slot = slot, (slot + 1) % SLOTS
            sequences.copy(origin, slot, length)
        begin = {"prefill": held, "restart": 0}.get(action, length)
        if begin < CONTEXT and (action != "prefill" or sequences.next[slot] == begin):
            sequences.prefill(slot, begin, min(source.randint(1, 16), CONTEXT - begin))
            done[action] += 1
    assert min(done.values()) >= 2, done


def test_a_prefix_that_a_buffer_has_overwritten_is_not_reused():
    written = WrittenPositions(slots=2, context_length=1000, chunk=16, shortest=24)
    written.prefill(0, 0, 14, 16)
    assert all(written.can_reuse(0, length) for length in range(15))  # nothing is overwritten
    for offset in range(14, 46, 16):
        written.prefill(0, offset, 16, 16)
    written.prefill(0, 46, 5, 16)
    # 62 positions, 11 of them padding, and 16 may follow what is reused.
    assert [length for length in range(52) if written.can_reuse(0, length)] == [0, *range(46, 52)]
    written.decode(0, 20)
    written.copy(0, 1)
    assert [length for length in range(72) if written.can_reuse(1, length)] == [0, *range(56, 72)]
    written.prefill(1, 0, 3, 4)  # another sequence
    assert written.can_reuse(1, 2)
    assert WrittenPositions(1, 1000, 16, 1024).can_reuse(0, 5)  # no layer has a rolling buffer


def test_a_buffer_that_is_not_shorter_than_the_context_is_no_rolling_one():
    layout = LAYOUTS["dot"]
    lengths = [CacheSize(context, 4, 16, layout).positions(9) for context in (20, 24, 25, 1000)]
    assert lengths == [24, 32, 24, 24]
    assert CacheSize(1000, 4, 16, layout).positions() == 1008
