"""Sizes of a served model on a device: weights, KV cache and the state of sampling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.serving_program import batch_shards
from graphtrain.cost_model.native_equivalent import with_native_model
from graphtrain.cost_model.weights import axes_in_use
from graphtrain.models.attention.cache_layout import (
    CachedLayer,
    CacheLayout,
    CacheSize,
    cache_layout,
)
from graphtrain.models.lora.trainable import ADAPTERS
from sharding_rules.arrays import ArraySpec
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import Plan, make_plan

_KV_CACHE, _SEQUENCES = "state/kv_cache/", "state/sequences/"


@dataclass(frozen=True)
class ServedWeight:
    """One served array of weights; the sizes are bytes of a device."""

    path: str
    spec: ArraySpec
    stored_bytes: int
    used_bytes: int  # in matrix products, gathered from shards

    @property
    def is_gathered(self) -> bool:
        return self.used_bytes > self.stored_bytes

    @property
    def is_int8(self) -> bool:
        return self.spec.dtype == "int8"


@dataclass(frozen=True)
class ServedCache:
    """KV cache of one layer."""

    bytes_per_token: int  # of one slot, on a device
    window: int | None  # sliding window in positions


@dataclass(frozen=True)
class ServedSizes:
    """A served program with a number of slots and a context; the sizes are bytes of a device."""

    program: ResolvedProgram  # as serving_program() returns it
    native: ResolvedProgram  # the same with a native model of the same sizes
    plan: Plan  # of weights and state, with the program's own slots and context
    weights: tuple[ServedWeight, ...]
    slots: int
    context: int  # tokens of a sequence
    caches: tuple[ServedCache, ...]
    sampling_bytes_per_slot: int

    @classmethod
    def of(
        cls,
        program: ResolvedProgram,
        arrays: Mapping[str, ArraySpec],
        layers: Mapping[str, CachedLayer],
    ) -> ServedSizes:
        """Return the served model of a program.

        Args:
            program: the program, as serving_program() returns it.
            arrays: ArraySpecs by path, which begins with "weights" or "state".
            layers: Layers whose keys and values are cached, by path.

        Raises:
            PlanError: the sizes of an imported model are not known.
            ShardingError: the rules cannot split an array.
        """
        plan, slots = make_plan(arrays, program.rules, program.mesh), program.settings.serve.slots
        slots_of_device = slots // batch_shards(program)
        sampling = sum(plan.shard_bytes(path) for path in arrays if path.startswith(_SEQUENCES))
        size = _cache_size(program, program.batch.seq_len)
        return cls(
            program,
            program.with_settings(with_native_model(program.settings)),
            plan,
            _weights(plan, program),
            slots,
            program.batch.seq_len,
            tuple(
                ServedCache(
                    sum(plan.shard_bytes(f"{_KV_CACHE}{path}/{name}") for name in ("key", "value"))
                    // slots_of_device
                    // size.positions(layer.window),
                    layer.window,
                )
                for path, layer in layers.items()
            ),
            sampling_bytes_per_slot=sampling // slots_of_device,
        )

    def resized(self, *, slots: int | None = None, context: int | None = None) -> ServedSizes:
        """Return the model with another number of slots or another context."""
        return replace(self, slots=slots or self.slots, context=context or self.context)

    @property
    def mesh(self) -> MeshShape:
        return self.program.mesh

    @property
    def slots_of_device(self) -> int:
        return self.slots // batch_shards(self.program)

    @property
    def positions(self) -> list[int]:
        """Positions of a slot's KV cache in each layer."""
        size = _cache_size(self.program, self.context)
        return [size.positions(cache.window) for cache in self.caches]

    @property
    def cached_positions(self) -> int:
        """Positions of a slot's longest KV cache."""
        return max(self.positions)

    @property
    def layers_by_positions(self) -> dict[int, int]:
        """Number of layers by the positions of their KV cache, the longest first."""
        return dict(sorted(Counter(self.positions).items(), reverse=True))

    @property
    def cache_layout(self) -> CacheLayout:
        return cache_layout(self.program.target)

    @property
    def weights_bytes(self) -> int:
        return sum(weight.stored_bytes for weight in self.weights)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token of one slot, while it is in the window of every layer."""
        return sum(cache.bytes_per_token for cache in self.caches)

    @property
    def kv_bytes_by_layer(self) -> list[int]:
        """Bytes of one slot in each layer."""
        pairs = zip(self.caches, self.positions, strict=True)
        return [cache.bytes_per_token * positions for cache, positions in pairs]

    @property
    def adapters(self) -> tuple[ServedWeight, ...]:
        """Weights that are LoRA factors beside the base."""
        return tuple(each for each in self.weights if each.path.startswith(f"{ADAPTERS}/"))

    @property
    def adapter_bytes(self) -> int:
        return sum(weight.stored_bytes for weight in self.adapters)

    @property
    def kv_bytes_per_slot(self) -> int:
        return sum(self.kv_bytes_by_layer)

    @property
    def kv_cache_bytes(self) -> int:
        return self.slots_of_device * self.kv_bytes_per_slot

    @property
    def sampling_bytes(self) -> int:
        return self.slots_of_device * self.sampling_bytes_per_slot

    @property
    def resident_bytes(self) -> int:
        """Bytes that stay on a device between programs."""
        return self.weights_bytes + self.kv_cache_bytes + self.sampling_bytes


def _cache_size(program: ResolvedProgram, context: int) -> CacheSize:
    prefill = program.settings.serve.prefill
    return CacheSize(context, prefill[0], prefill[-1], cache_layout(program.target))


def _weights(plan: Plan, program: ResolvedProgram) -> tuple[ServedWeight, ...]:
    return tuple(
        ServedWeight(
            path.removeprefix("weights/"),
            layout.spec,
            plan.shard_bytes(path),
            layout.spec.nbytes
            // plan.mesh.size(axes_in_use(layout.spec, program.rules, plan.mesh)),
        )
        for path, layout in plan.layouts.items()
        if path.startswith("weights/")
    )


def vocab_weights(weights: Sequence[ServedWeight]) -> list[ServedWeight]:
    """Return the embedding and the LM head, which are one array if they are tied."""
    return [each for each in weights if "vocab" in each.spec.axes and len(each.spec.shape) > 1]
