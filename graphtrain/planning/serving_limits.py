"""Largest number of slots and longest context with which a served model fits in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from graphtrain.cache import Cache
from graphtrain.compile.tasks import Observer
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.serving_program import batch_shards, serving_program
from graphtrain.cost_model.served_sizes import ServedSizes
from graphtrain.cost_model.serving_assessment import Limit, ServingMemory
from graphtrain.cost_model.serving_memory import temporaries
from graphtrain.planning.serving_programs import (
    LOAD,
    compile_serving,
    program_memory,
    served_sizes,
)
from lowering.artifact import Artifact

_MOST_SLOTS = 1 << 16
_LONGEST = 1 << 24  # tokens
_CONFIRMATIONS = 3  # number of slots to compile at most
_STEP = 50  # part of the slots to leave out, if the compiler says only that the memory is too small


def memory_at(model: ServedSizes, memory: ServingMemory) -> dict[str, int]:
    """Return the bytes that each program needs on a device, with weights and state.

    What a program holds beside them is changed by as much as arithmetic expects.

    Args:
        model: the served model, perhaps with other slots or another context.
        memory: its memory with the slots and the context of its program.
    """
    serve, batch = model.program.settings.serve, model.program.batch
    known = model.resized(slots=serve.slots, context=batch.seq_len)

    def beside(graph: str, temporary_bytes: int) -> int:
        added = temporaries(model, graph) - temporaries(known, graph)
        return max(0, temporary_bytes + added)

    needed = {
        one.graph: model.resident_bytes + beside(one.graph, one.temporaries)
        for one in memory.programs
    }
    return needed | {LOAD: memory.loading + model.resident_bytes - known.resident_bytes}


def most_slots(model: ServedSizes, memory: ServingMemory) -> Limit:
    """Return the largest number of slots that fits, a multiple of the devices that split them."""
    shards = batch_shards(model.program)

    def fits(count: int) -> bool:
        resized = model.resized(slots=count * shards)
        return max(memory_at(resized, memory).values()) <= memory.capacity

    most = _MOST_SLOTS // shards
    found = _largest(fits, most)
    return Limit(found * shards, "estimate", "search" if found == most else "memory")


def longest_context(model: ServedSizes, memory: ServingMemory) -> Limit:
    """Return the longest context that fits with the model's slots."""
    padding, block = model.program.settings.serve.prefill[0], model.cache_layout.block

    def fits(blocks: int) -> bool:
        context = blocks * block - padding
        if context <= 0:
            return True
        return max(memory_at(model.resized(context=context), memory).values()) <= memory.capacity

    longest = max(0, _largest(fits, _LONGEST // block) * block - padding)
    native = model.native.model
    if native.positions == "learned" and (most := native.max_position_embeddings or 0) < longest:
        return Limit(most, "estimate", "model")
    return Limit(longest, "estimate", "search" if longest == _LONGEST - padding else "memory")


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number from 1 to `most` that fits, by bisection; 0 if none does."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def confirmed_slots(
    program: ResolvedProgram,
    model: ServedSizes,
    memory: ServingMemory,
    slots: Limit,
    cache: Cache,
    observe: Observer,
) -> Limit:
    """Compile the program that needs most with the largest number of slots.

    If it does not fit, try as many slots as would fit if its memory grew evenly. The result is an
    estimate if no number was confirmed.
    """
    peaks = memory_at(model, memory)
    for _ in range(_CONFIRMATIONS):
        if not slots.value:
            break
        needed = memory_at(model.resized(slots=slots.value), memory)
        graph = max(needed, key=lambda name: needed[name])
        serve = replace(program.settings.serve, slots=slots.value)
        changed = program.with_settings(replace(program.settings, serve=serve))
        compiled, failed = compile_serving(changed, "serve", cache, observe, [graph])
        if graph not in compiled and failed[graph].kind != "OutOfMemory":
            break
        fewer = slots.value * (_STEP - 1) // _STEP
        if graph in compiled:
            peak = _peak_on_device(changed, graph, compiled[graph])
            if peak <= memory.capacity:
                return replace(slots, source="compiler")
            share = (memory.capacity - peaks[graph]) / (peak - peaks[graph])
            fewer = math.floor(model.slots + share * (slots.value - model.slots))
        shards = batch_shards(model.program)
        slots = Limit(max(0, fewer // shards * shards), "estimate")
    return slots


def _peak_on_device(program: ResolvedProgram, graph: str, artifact: Artifact) -> int:
    """Return the peak of a device in a program, with weights and state that it does not read."""
    if graph == LOAD:
        return artifact.record["memory"]["peak"]
    model = served_sizes(serving_program(program))
    return model.resident_bytes + program_memory(model, graph, artifact, None).temporaries
