"""Layout and length of a KV cache, by target and layer; imports no JAX."""

from dataclasses import dataclass
from typing import Literal

from lowering.machine.target import Target


@dataclass(frozen=True)
class CacheLayout:
    """Order of the dimensions of a layer's KV cache.

    The letters are those of einsum equations: b for slots, h for KV heads, k for positions and d
    for head_dim.
    """

    key: str
    value: str
    block: int  # positions that attention reads at a time; the length of a cache is a multiple
    writes: Literal["rows", "scatter", "loop"]  # how tokens of all slots are written in place


# The products of one query with all keys read consecutive memory: compared with (slots, length,
# kv_heads, head_dim), decode attention takes 0.15 to 0.4 of the time on a CPU.
DOT_LAYOUT = CacheLayout(key="bhdk", value="bhkd", block=256, writes="rows")
# Pages of one KV head lie together, as JAX's kernels of paged attention read them. Around a
# scatter, XLA:TPU copies the cache into another layout and back; on GPUs, a loop launches a kernel
# for each slot.
_PAGED_LAYOUTS = {
    "cuda": CacheLayout(key="hbkd", value="hbkd", block=512, writes="scatter"),
    "tpu": CacheLayout(key="hbkd", value="hbkd", block=512, writes="loop"),
}


def cache_layout(target: Target) -> CacheLayout:
    """Return the layout of a target: by pages where it has a kernel of paged attention."""
    return _PAGED_LAYOUTS.get(target.platform, DOT_LAYOUT)


@dataclass(frozen=True)
class CachedLayer:
    """Layer whose keys and values are cached.

    Attributes:
        kv_heads: Number of KV heads.
        head_dim: Size of a head.
        window: Sliding window in positions; None: the layer sees all earlier positions.
        value_dim: Size of a head of values; None: as of keys.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    value_dim: int | None = None


@dataclass(frozen=True)
class CacheSize:
    """Sizes from which the lengths of the layers' KV caches follow.

    Attributes:
        context_length: Number of tokens that a sequence may have.
        padding: Number of positions beyond it that padded tokens may reach.
        chunk: Number of new tokens of a call, at most, padding included.
        layout: Layout of the KV cache.
    """

    context_length: int
    padding: int
    chunk: int
    layout: CacheLayout

    def positions(self, window: int | None = None) -> int:
        """Return the number of positions in the KV cache of a layer.

        A layer with a sliding window has a rolling buffer if that is shorter than the context:
        position i is stored at i modulo its length. New tokens are stored before their attention is
        computed, so the buffer holds what the first of them sees, and all of them.

        Source: Jiang et al. 2023, "Mistral 7B", section 2, "Rolling Buffer Cache",
        https://arxiv.org/abs/2310.06825
        """
        rolling = None if window is None else self._blocks(window + self.chunk - 1)
        if rolling is not None and rolling < self.context_length:
            return rolling
        return self._blocks(self.context_length + self.padding)

    def _blocks(self, positions: int) -> int:
        return -(-positions // self.layout.block) * self.layout.block


def is_rolling(positions: int, context_length: int) -> bool:
    """Return whether a KV cache with so many positions is a rolling buffer: others have more."""
    return positions < context_length
