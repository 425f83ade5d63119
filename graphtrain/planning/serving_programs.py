"""Programs that serve: compile them into the cache, and read what they hold on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from graphtrain.cache import Cache
from graphtrain.compile.driver import compile_tasks
from graphtrain.compile.tasks import Limits, Observer, TaskOutcome, tasks_of
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.served_sizes import ServedSizes
from graphtrain.cost_model.serving_assessment import ProgramMemory, ServingMemory
from graphtrain.cost_model.serving_memory import loading, temporaries
from graphtrain.errors import PlanError
from graphtrain.graphs.names import ServingPurpose
from lowering.artifact import Artifact
from sharding_rules.plan import make_plan

LOAD = "serve_init"


def served_sizes(program: ResolvedProgram) -> ServedSizes:
    """Return what a device holds for a program, as serving_program() returns it."""
    from graphtrain.graphs.open_model import open_language_model
    from graphtrain.graphs.served_model import state_specs, weight_specs  # imports JAX
    from lowering.trees import flatten

    arrays = {"weights": weight_specs(program), "state": state_specs(program)}
    layers = open_language_model(program.model).cached_layers()
    return ServedSizes.of(program, flatten(arrays), layers)


def parameter_bytes(program: ResolvedProgram) -> int:
    """Return the bytes of a device's parameters before a served program casts them."""
    from graphtrain.graphs.build import build_graph  # imports JAX
    from lowering.trees import flatten

    inputs = flatten(dict(build_graph(program, LOAD).inputs))
    return make_plan(inputs, program.rules, program.mesh).bytes_per_device()


def compile_serving(
    program: ResolvedProgram,
    purpose: ServingPurpose,
    cache: Cache,
    observe: Observer,
    only: Sequence[str] | None = None,
) -> tuple[dict[str, Artifact], dict[str, TaskOutcome]]:
    """Return the compiled programs by name, and the outcomes of those that are not compiled.

    Raises:
        PlanError: tracing found that the rules cannot split an array.
    """
    tasks = [
        replace(task, label=task.graph, configuration="")
        for task in tasks_of({"": program}, purpose)
        if only is None or task.graph in only
    ]
    slots = f", {program.settings.serve.slots} slots" if only else ""
    report = compile_tasks(
        tasks, cache, Limits(), observe=lambda label, stage: observe(label + slots, stage)
    )
    artifacts = {
        one.label: cache.get(one.digest) if one.digest else None for one in report.outcomes
    }
    failed = {one.label: one for one in report.outcomes if artifacts[one.label] is None}
    if wrong := next((one for one in failed.values() if one.kind == "ShardingError"), None):
        raise PlanError(wrong.error)
    return {name: one for name, one in artifacts.items() if one is not None}, failed


def serving_memory(
    model: ServedSizes,
    graphs: Sequence[str],
    compiled: Mapping[str, Artifact],
    failed: Mapping[str, TaskOutcome],
    parameters: int,
) -> ServingMemory:
    """Return the memory of a device.

    Args:
        model: the served model.
        graphs: names of the programs.
        compiled: those that are compiled; others are estimated.
        failed: outcomes of those that could not be compiled.
        parameters: bytes of a device's parameters before they are cast.
    """
    load = compiled.get(LOAD)
    return ServingMemory(
        weights=model.weights_bytes,
        kv_cache=model.kv_cache_bytes,
        sampling=model.sampling_bytes,
        programs=tuple(
            program_memory(model, name, compiled.get(name), failed.get(name))
            for name in graphs
            if name != LOAD
        ),
        loading=loading(model, parameters) if load is None else load.record["memory"]["peak"],
        loading_source="estimate" if load is None else "compiler",
        capacity=model.program.target.usable_memory_bytes,
    )


def program_memory(
    model: ServedSizes, name: str, artifact: Artifact | None, outcome: TaskOutcome | None
) -> ProgramMemory:
    """Return what a program holds beside weights and state, by its compiler if it is compiled."""
    if artifact is None:
        kind = None if outcome is None else outcome.kind
        return ProgramMemory(
            name,
            temporaries(model, name),
            "estimate",
            compiler_out_of_memory=kind == "OutOfMemory",
            error=outcome.error or "" if outcome is not None and kind == "LoweringError" else "",
        )
    arrays = model.plan.layouts.keys() & artifact.record["inputs"].keys()
    held = sum(map(model.plan.shard_bytes, arrays))
    return ProgramMemory(name, max(0, artifact.record["memory"]["peak"] - held), "compiler")
