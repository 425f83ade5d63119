"""Assess a training step: compile it and read memory and collectives, or estimate them.

The step is compiled into the cache, under the keys that `graphtrain compile` uses. A plan of a
cached program therefore compiles nothing, and a run finds the programs that a plan compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from graphtrain.cache import Cache
from graphtrain.compile.driver import compile_tasks
from graphtrain.compile.tasks import Limits, Observer, TaskOutcome, tasks_of
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import TorchModel
from graphtrain.cost_model.assessment import Assessment, Memory
from graphtrain.cost_model.compute import compiled_excess, expected_excess, flops_by_part
from graphtrain.cost_model.findings import findings
from graphtrain.cost_model.host_transfers import host_bytes
from graphtrain.cost_model.memory import memory as estimated_memory
from graphtrain.cost_model.padded_stages import with_padding_layers
from graphtrain.cost_model.profiled_time import with_profile
from graphtrain.cost_model.score_products import skips_scores
from graphtrain.cost_model.time import mfu, moved_bytes, step_time
from graphtrain.cost_model.traffic import bubble_of, predict_collectives
from graphtrain.errors import PlanError
from graphtrain.graphs.plan import plan_program
from graphtrain.models.attention.kernel_support import step_uses_flash_kernel
from graphtrain.models.chunk_size import loss_chunk
from graphtrain.planning.quantized_products import with_products
from lowering.hlo.collectives import Collective, merged
from sharding_rules.errors import UserError
from sharding_rules.plan import Plan


def assess(
    program: ResolvedProgram,
    cache: Cache,
    observe: Observer = lambda label, stage: None,
    *,
    compile: bool = True,
) -> Assessment:
    """Compile the training step into the cache and read its memory and collectives.

    If the compiler of the target is not installed, return an estimate, with a remark that says what
    to install. A step that does not fit in memory is not an error.

    Args:
        program: the program to assess.
        cache: cache to read from and compile into.
        observe: called with each label and stage of the compilation.
        compile: if False, only estimate.

    Raises:
        PlanError: tracing found that the rules cannot split an array.
        ShardingError: the rules cannot split an array.
    """
    return assess_all({"": program}, cache, observe, compile=compile)[""]


def assess_all(
    programs: Mapping[str, ResolvedProgram],
    cache: Cache,
    observe: Observer = lambda label, stage: None,
    plan: Callable[[ResolvedProgram], Plan] = plan_program,
    *,
    compile: bool = True,
    jobs: int | None = None,
) -> dict[str, Assessment]:
    """Assess several programs by name, compiling in parallel. See assess()."""
    plans = {name: plan(program) for name, program in programs.items()}
    if not compile:
        return {name: estimate(program, plans[name]) for name, program in programs.items()}
    assessed = _compiled(programs, plans, cache, observe, jobs)
    for assessment in assessed.values():
        if isinstance(assessment, UserError):
            raise assessment
    return {name: one for name, one in assessed.items() if isinstance(one, Assessment)}


def compile_each(
    programs: Mapping[str, ResolvedProgram],
    cache: Cache,
    observe: Observer = lambda label, stage: None,
    *,
    jobs: int | None = None,
) -> dict[str, Assessment | UserError]:
    """Assess several programs by name as assess_all() does; of one that is refused, the error."""
    plans: dict[str, Plan] = {}
    refused: dict[str, Assessment | UserError] = {}
    for name, program in programs.items():
        try:
            plans[name] = plan_program(program)
        except UserError as error:
            refused[name] = error
    planned = {name: program for name, program in programs.items() if name in plans}
    return refused | _compiled(planned, plans, cache, observe, jobs)


def _compiled(
    programs: Mapping[str, ResolvedProgram],
    plans: Mapping[str, Plan],
    cache: Cache,
    observe: Observer,
    jobs: int | None,
) -> dict[str, Assessment | UserError]:
    """Compile programs; of one that tracing refuses, return the error."""
    tasks = {name: _train_task(name, program) for name, program in programs.items()}
    report = compile_tasks(list(tasks.values()), cache, Limits(jobs=jobs), observe=observe)
    outcomes = {outcome.label: outcome for outcome in report.outcomes}
    return {
        name: _from_outcome(program, plans[name], outcomes[tasks[name].label], cache)
        for name, program in programs.items()
    }


def estimate(program: ResolvedProgram, plan: Plan | None = None) -> Assessment:
    """Estimate a program without the compiler. If a plan is given, do not import JAX."""
    padded_program, plan = with_padding_layers(program), plan or plan_program(program)
    memory = estimated_memory(padded_program)
    if isinstance(program.model, TorchModel) and not program.model.images:
        memory = _with_state(memory, program, plan)  # a plan with images may lack their tower
    return _assessment(
        program,
        plan,
        memory,
        merged(predict_collectives(padded_program)),
        "estimate",
    )


def _train_task(name: str, program: ResolvedProgram) -> Any:
    (task,) = (task for task in tasks_of({name: program}) if task.graph == "train")
    return replace(task, label=f"{name} train".strip(), configuration="")


def _from_outcome(
    program: ResolvedProgram, plan: Plan, outcome: TaskOutcome, cache: Cache
) -> Assessment | UserError:
    artifact = cache.get(outcome.digest) if outcome.digest else None
    if artifact is None:
        if outcome.kind == "ShardingError":
            return PlanError(outcome.error)
        guess = estimate(program, plan)
        memory = replace(guess.memory, compiler_out_of_memory=outcome.kind == "OutOfMemory")
        return replace(guess, memory=memory, note=_missing_reason(outcome))
    record = artifact.record
    collectives = tuple(Collective.from_record(entry) for entry in record["collectives"])
    memory = _memory_by_part(record["memory"]["peak"], program, plan)
    remark = ""
    if record["unknown_loops"]:
        remark = (
            f"{record['unknown_loops']} loops of the compiled program have an unknown trip count; "
            "collectives inside them are counted once"
        )
    flops = record.get("flops") or None  # None: the backend reads no FLOPs
    compiled = _assessment(program, plan, memory, collectives, "compiler", flops, record)
    compiled = replace(compiled, compile_seconds=record["compile_seconds"], note=remark)
    if program.settings.precision.matmul_dtype is None:
        return compiled
    return with_products(compiled, record.get("products", {}))


def _missing_reason(outcome: TaskOutcome) -> str:
    """Return the reason why there is no compiled program."""
    if outcome.error is None:
        return "the compiled program was removed from the cache after its compilation"
    if outcome.kind in ("OutOfMemory", "LoweringError", "CompilerMissing", "MissingExtra"):
        return outcome.error
    return f"the compiler failed: {outcome.error}; StableHLO and log are in {outcome.failure}"


def _memory_by_part(peak: int, program: ResolvedProgram, plan: Plan) -> Memory:
    """Split the compiler's peak into parts: state is exact, gradients and activations estimated."""
    guess = estimated_memory(with_padding_layers(program))
    parameters, frozen, optimizer = _state_bytes(plan)
    remaining_bytes = max(0, peak - parameters - frozen - optimizer)
    gradients = min(guess.gradients, remaining_bytes)
    activations = min(guess.activations, remaining_bytes - gradients)
    return replace(
        guess,
        parameters=parameters,
        frozen=frozen,
        optimizer=optimizer,
        gradients=gradients,
        activations=activations,
        temporaries=remaining_bytes - gradients - activations,
        peak=peak,
        source="compiler",
    )


def _with_state(memory: Memory, program: ResolvedProgram, plan: Plan) -> Memory:
    """Return an estimate whose weights and moments are those of the arrays that are planned.

    A native model of the size of an imported one has about as many, and gradients in proportion.
    """
    parameters, frozen, optimizer = _state_bytes(plan)
    if program.optimizer.offload_to_host:
        optimizer = memory.optimizer
    gradients = memory.gradients
    if memory.optimizer and not program.optimizer.offload_to_host:
        gradients = round(gradients * optimizer / memory.optimizer)
    state = parameters + frozen + optimizer
    added = state - memory.parameters - memory.frozen - memory.optimizer
    added += gradients - memory.gradients
    return replace(
        memory,
        parameters=parameters,
        frozen=frozen,
        optimizer=optimizer,
        gradients=gradients,
        peak=max(state, memory.peak + added),
    )


def _state_bytes(plan: Plan) -> tuple[int, int, int]:
    """Return the bytes on a device of weights with constants, frozen weights, and moments."""
    roles = "parameter", "buffer", "constant", "frozen", "optimizer"
    trained, buffers, constants, frozen, optimizer = map(plan.bytes_per_device, roles)
    return trained + buffers + constants, frozen, optimizer


_TOO_FAST = (
    "the model FLOPs utilization is above 100 %: the peak of this processor is read too low, or "
    "the profile of the machine is not its own; measure it again with graphtrain doctor --measure"
)


def _assessment(
    program: ResolvedProgram,
    plan: Plan,
    memory: Memory,
    collectives: tuple[Collective, ...],
    source: Any,
    flops: float | None = None,
    record: Mapping[str, Any] | None = None,
) -> Assessment:
    padded_program, bubble = with_padding_layers(program), bubble_of(program)
    flash = step_uses_flash_kernel(padded_program)
    excess = None
    if flops is not None:
        excess = compiled_excess(padded_program, flops, flash=flash, bubble=bubble)
    counted = expected_excess(program, flash=flash) if excess is None else excess
    time = step_time(padded_program, memory, collectives, bubble, flash=flash, excess=counted)
    moved = partial(moved_bytes, padded_program, memory, flash)
    time = with_profile(time, padded_program, collectives, record, moved)
    seconds = time.total if time.is_complete else None
    used = mfu(program, seconds, causal=skips_scores(padded_program, flash=flash))
    found = findings(program, excess, is_estimate=source == "estimate")
    return Assessment(
        target=program.settings.target,
        plan=plan,
        memory=replace(memory, host=host_bytes(padded_program)),
        collectives=collectives,
        collectives_source=source,
        time=time,
        mfu=used,
        mfu_causal=mfu(program, seconds, causal=True),
        flops=flops_by_part(program, flash=flash),
        chunk=loss_chunk(padded_program),
        findings=found if used is None or used <= 1 else (*found, _TOO_FAST),
        flops_excess=excess,
    )
