"""Roofline of decode and prefill: FLOPs, bytes read from memory, and collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from graphtrain.config.serving_program import batch_shards
from graphtrain.cost_model.communication_time import communication_seconds
from graphtrain.cost_model.compute import computes_all_experts, replicated_over
from graphtrain.cost_model.predicted_collective import (
    activation_dtype,
    collective,
    splitting_axes,
)
from graphtrain.cost_model.served_sizes import ServedSizes, vocab_weights
from graphtrain.cost_model.serving_assessment import Speed
from graphtrain.models.flops import forward_flops_by_part
from graphtrain.models.lora.trainable import LORA_A
from lowering.hlo.collectives import Collective
from sharding_rules.arrays import ArraySpec


def speeds(
    model: ServedSizes, collectives: Mapping[str, Sequence[Collective]]
) -> tuple[Speed, ...]:
    """Return the roofline of decode with one and with all slots, and of the largest prefill.

    Decode reads all of a slot's KV cache, as the programs for GPUs and TPUs do.

    Args:
        model: the served model.
        collectives: those of the compiled programs, by graph; others are predicted.
    """
    prefill = model.program.settings.serve.prefill[-1]
    has_all = model.slots > 1
    one = "decode_one" if model.slots_of_device == model.slots and has_all else "decode"
    rows = [("decode, 1 slot", one, 1, 1)]
    if has_all:
        rows.append((f"decode, {model.slots} slots", "decode", model.slots, 1))
    rows.append((f"prefill, {prefill} tokens", f"prefill_{prefill}", 1, prefill))
    return tuple(
        _speed(model, what, graph, slots, tokens, collectives.get(graph))
        for what, graph, slots, tokens in rows
    )


def _speed(
    model: ServedSizes,
    what: str,
    graph: str,
    slots: int,
    tokens: int,
    compiled: Sequence[Collective] | None,
) -> Speed:
    program, target = model.program, model.program.target
    # Decode computes all slots of a device, active or not.
    computed = model.slots if graph == "decode" else 1
    held = model.slots_of_device if graph == "decode" else 1
    peak = target.peak_flops(program.model.dtype) / target.devices
    bandwidth = target.specification.get("bandwidth")
    sent = predict_collectives(model, graph) if compiled is None else compiled
    flops, read = _flops_of_device(model, computed, tokens), _bytes_read(model, held, tokens)
    return Speed(
        what,
        graph,
        slots * tokens,
        compute=flops / peak if peak else None,
        memory=read / bandwidth if bandwidth else None,
        communication=_communication(model, graph, sent),
    )


def _communication(
    model: ServedSizes, graph: str, collectives: Iterable[Collective]
) -> dict[str, float | None]:
    """Return the seconds of communication by mesh axes.

    Weights are gathered before the loop over tokens, once for the tokens of a call.
    """
    per_call = model.program.settings.serve.tokens_per_call if graph.startswith("decode") else 1
    seconds: dict[str, float | None] = {}
    for moves_weights in (False, True):
        chosen = [each for each in collectives if _moves_weights(each) == moves_weights]
        share = 1 / per_call if moves_weights else 1.0
        times = communication_seconds(chosen, model.mesh, model.program.target)
        for axes, time in times.items():
            known = seconds.get(axes, 0.0)
            seconds[axes] = None if time is None or known is None else known + share * time
    return seconds


def _moves_weights(each: Collective) -> bool:
    return bool(each.arrays) and all(path.startswith("weights/") for path in each.arrays)


def _flops_of_device(model: ServedSizes, slots: int, tokens: int) -> float:
    """Return the FLOPs of a device for new tokens of each slot."""
    program, native = model.program, model.native
    # Attention's FLOPs are proportional to the positions.
    parts = forward_flops_by_part(native.model, sum(model.positions) // len(model.positions))
    batch = set(program.rules.activations.get("batch", ()))
    unneeded = 1.0
    if native.model.moe is not None and computes_all_experts(program, is_serving=True):
        unneeded = native.model.moe.experts / native.model.moe.experts_per_token
    total = 0.0
    for name, flops in parts.items():
        repeated = set(replicated_over(program, name)) | (batch if slots == 1 else set())
        new = slots if name == "LM head" else slots * tokens
        copies = model.mesh.size(tuple(repeated))
        total += flops * new * copies * (unneeded if name == "MLP" else 1.0)
    return total / program.target.devices + _adapter_flops_of_device(model, slots, tokens)


def _adapter_flops_of_device(model: ServedSizes, slots: int, tokens: int) -> float:
    """Return the FLOPs of products with the ranks of all adapters, whichever a slot uses."""
    elements = sum(
        each.used_bytes // ArraySpec((), (), each.spec.dtype).nbytes for each in model.adapters
    )
    rows = slots if slots == 1 else slots // batch_shards(model.program)
    return 2.0 * elements * rows * tokens


def _bytes_read(model: ServedSizes, slots: int, tokens: int) -> float:
    """Return the bytes of weights and KV cache that a device reads for new tokens of its slots."""
    return _weights_read(model, slots * tokens) + slots * model.kv_bytes_per_slot


def _weights_read(model: ServedSizes, tokens: int) -> float:
    """Return the bytes of weights that the products for some tokens read.

    A lookup reads rows of an embedding only. Products of a mixture without a grouped matrix product
    read all experts, others those that tokens chose.
    """
    mixture, share = model.native.model.moe, 1.0
    if mixture is not None and not computes_all_experts(model.program, is_serving=True):
        share = min(1.0, tokens * mixture.experts_per_token / mixture.experts)
    tables = {each.path for each in vocab_weights(model.weights)[:-1]}
    # GPUs read codes, and write and read the converted matrix; products of one row convert inside.
    is_converted = model.program.target.is_gpu and tokens > 1
    int8_factor = 1 + 2 * activation_dtype(model.program)[0] if is_converted else 1
    return sum(
        each.used_bytes
        * (share if "experts" in each.spec.axes else 1.0)
        * (int8_factor if each.is_int8 else 1)
        for each in model.weights
        if each.path not in tables and "positions" not in each.spec.axes
    )


def predict_collectives(model: ServedSizes, graph: str) -> tuple[Collective, ...]:
    """Predict the collectives of one step of a program, without those of single numbers.

    Args:
        model: the served model.
        graph: name of the program.
    """
    found = (*_of_weights(model), *_of_activations(model, graph))
    return tuple(each for each in found if each.devices > 1 and each.bytes)


def _of_weights(model: ServedSizes) -> Iterator[Collective]:
    _, dtype = activation_dtype(model.program)
    for weight in model.weights:
        if weight.is_gathered:
            layout = model.plan.layouts[f"weights/{weight.path}"]
            used = splitting_axes(
                model.program.rules.activations, _named(weight.spec.axes), model.mesh
            )
            axes = tuple(name for names in layout.split for name in names if name not in used)
            gather = collective(
                "all-gather", axes, 1, weight.used_bytes, mesh=model.mesh, dtype=dtype
            )
            yield replace(gather, arrays=(f"weights/{weight.path}",))


def _named(axes: Sequence[str | None]) -> list[str]:
    return [axis for axis in axes if axis]


def _of_activations(model: ServedSizes, graph: str) -> Iterator[Collective]:
    """Yield the sums over devices that split heads or the MLP, and gathers of logits.

    An output projection with LoRA factors has partial sums of their ranks too, of all of which some
    are then left out, so that they are reduced before.
    """
    settings, table, mesh = model.native.model, model.program.rules.activations, model.mesh
    size = graph.rpartition("_")[2]
    tokens = int(size) if size.isdigit() else 1
    rows = model.slots_of_device if graph == "decode" else 1
    item, dtype = activation_dtype(model.program)
    stream = rows * tokens * settings.embed * item
    heads, mlp, vocab = (splitting_axes(table, (axis,), mesh) for axis in ("heads", "mlp", "vocab"))
    for axes, count in ((heads, settings.layers), (mlp, settings.layers), (vocab, 1)):
        yield collective("all-reduce", axes, count, stream, mesh=mesh, dtype=dtype)
    total_rank = model.program.settings.serve.total_adapter_rank
    for each in model.adapters:
        if f"/{LORA_A}/" in each.path:
            axes = splitting_axes(table, _named(each.spec.axes), mesh)
            ranks = rows * tokens * total_rank * item
            yield collective("all-reduce", axes, 1, ranks, mesh=mesh, dtype=dtype)
    logits = rows * settings.vocab * 4
    yield collective("all-gather", vocab, 2, logits, mesh=mesh, dtype="f32")
