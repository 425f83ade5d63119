"""Findings of a served model: what it holds or sends without need, and what to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from graphtrain.cost_model.compute import computes_all_experts
from graphtrain.cost_model.served_sizes import ServedSizes
from graphtrain.cost_model.serving_assessment import Limit, ServingMemory
from graphtrain.cost_model.serving_memory import temporaries
from lowering.hlo.collectives import Collective

# A copy or a gather of less is no finding: shares of what a device holds, and of its memory.
_MUCH, _LITTLE = 0.1, 0.01


def findings(
    model: ServedSizes,
    memory: ServingMemory,
    slots: Limit,
    context: Limit,
    collectives: Mapping[str, Sequence[Collective]],
) -> tuple[str, ...]:
    """Return one sentence for each finding, with its cause and what to do.

    Args:
        model: the served model.
        memory: its memory.
        slots: the largest number of slots.
        context: the longest context.
        collectives: those of the compiled programs, by graph.
    """
    return (
        *_too_large(model, memory, slots, context),
        *_loading(memory),
        *_gathered_weights(model),
        *_gathered_tables(model, collectives),
        *_copied(model, memory),
        *_replicated_cache(model),
        *_all_experts(model),
        *_refused(model, memory),
    )


def _too_large(
    model: ServedSizes, memory: ServingMemory, slots: Limit, context: Limit
) -> Iterator[str]:
    if memory.fits:
        return
    changes = [
        f"--set program.serve.{name}={limit.value}"
        for name, limit in (("slots", slots), ("context_length", context))
        if limit.value
    ]
    if changes:
        yield f"it does not fit; each of these changes would fit: {', '.join(changes)}"
    elif memory.resident - memory.kv_cache > memory.capacity or not changes:
        yield (
            f"no number of slots fits: the weights take {_mb(memory.weights)} MB of a device and "
            f"loading them {_mb(memory.loading)} MB. Split them over more devices "
            "(program.mesh.tensor)."
        )


def _loading(memory: ServingMemory) -> Iterator[str]:
    serving = memory.resident + memory.largest.temporaries
    if memory.loading > memory.capacity >= serving:
        yield (
            f"loading needs more than serving, {_mb(memory.loading)} against {_mb(serving)} MB: "
            "the float32 parameters are on the devices until they are cast. "
            "program.mesh.tensor or fsdp divides them."
        )


def _gathered_weights(model: ServedSizes) -> Iterator[str]:
    gathered = sum(each.used_bytes for each in model.weights if each.is_gathered)
    if not gathered:
        return
    count = model.program.settings.serve.tokens_per_call
    yield (
        f"every device gathers {_mb(gathered)} MB of weights for each call of decode, which "
        f"generates up to {count} tokens of a slot, and holds them meanwhile: fsdp divides the "
        "weights at rest only. program.mesh.tensor divides the products too."
    )


def _gathered_tables(
    model: ServedSizes, collectives: Mapping[str, Sequence[Collective]]
) -> Iterator[str]:
    """Yield a finding for weights that a compiled program gathers although it need not."""
    is_gathered = {each.path for each in model.weights if each.is_gathered}
    for graph, found in collectives.items():
        for each in found:
            paths = [path.removeprefix("weights/") for path in each.arrays]
            needless = len(paths) == 1 and paths[0] not in is_gathered
            if needless and each.op == "all-gather" and each.bytes > _MUCH * model.weights_bytes:
                yield (
                    f"{graph} gathers {paths[0]} over {'+'.join(each.axes)}, {_mb(each.bytes)} MB "
                    "on every device, although no rule requires it."
                )


def _copied(model: ServedSizes, memory: ServingMemory) -> Iterator[str]:
    """Yield a finding for programs whose temporaries are more than arithmetic expects."""
    for program in memory.programs:
        if program.source != "compiler":
            continue
        expected = temporaries(model, program.graph)
        more = program.temporaries - expected
        if more > max(_MUCH * memory.resident, _LITTLE * memory.capacity):
            yield (
                f"{program.graph} holds {_mb(program.temporaries)} MB beside weights and state, "
                f"{_mb(more)} MB more than expected: the compiler copies weights or KV cache."
            )


def _replicated_cache(model: ServedSizes) -> Iterator[str]:
    settings = model.native.model
    tensor = model.mesh.size(model.program.rules.activations.get("heads", ()))
    if settings.kv_heads == 1 and tensor > 1:
        yield (
            f"the KV cache has one head, so each of {tensor} devices holds all of it; "
            "program.mesh.data divides the slots instead."
        )


def _all_experts(model: ServedSizes) -> Iterator[str]:
    if model.native.model.moe is not None and (
        reason := computes_all_experts(model.program, is_serving=True)
    ):
        yield f"every token is computed by all experts: {reason}."


def _refused(model: ServedSizes, memory: ServingMemory) -> Iterator[str]:
    refused = [program for program in memory.programs if program.error]
    if refused:
        first = refused[0]
        names = ", ".join(program.graph for program in refused)
        yield f"{model.program.target} cannot serve this model as it is: {names}: {first.error}"


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f}"
