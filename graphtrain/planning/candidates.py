"""Enumerate and estimate every strategy whose sizes divide a model, a batch and a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from graphtrain.config.loss_positions import check_loss_chunk
from graphtrain.config.resolve import ResolvedProgram, resolve
from graphtrain.config.schema import Mesh, Model, PipelineSettings, Program, Remat
from graphtrain.config.tower import Tower
from graphtrain.cost_model.memory import memory
from graphtrain.cost_model.profiled_time import with_profile
from graphtrain.cost_model.score_products import skips_scores
from graphtrain.cost_model.time import mfu, moved_bytes, step_time
from graphtrain.cost_model.tower import tower_program
from graphtrain.cost_model.traffic import bubble_of, predict_collectives
from graphtrain.cost_model.weights import ShardedWeight, shard_weights
from graphtrain.models.attention.kernel_support import step_uses_flash_kernel
from graphtrain.models.optimizer_support import check_optimizer
from graphtrain.models.shapes import state_arrays
from graphtrain.planning.candidate import Candidate
from lowering.errors import LoweringError
from lowering.machine.target import Achieved, Target
from sharding_rules.arrays import ArraySpec
from sharding_rules.errors import ShardingError
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import divisors, make_plan
from sharding_rules.rules import Rules

_LoadRules = Callable[[Sequence[str]], Rules]

MAX_TENSOR = 64
MIN_CONTEXT_PARALLEL_LENGTH = (
    8192  # sequence length in tokens from which context parallelism is tried
)
_WIDEST_CONTEXT = 16
_MAX_VIRTUAL_STAGES = 8
_MAX_INTERLEAVED_STAGES = 4  # with 1F1B, which stores an input of each


@dataclass(frozen=True)
class SearchOptions:
    """Restrictions of the search for a kind of model."""

    stages: bool = True
    period: int = 1  # layers after which they repeat; a stage holds whole repetitions
    context: bool = True
    stages_with_context: bool = True
    one_f_one_b: bool = True
    remats: tuple[Remat, ...] = ("none", "attention", "dots", "full")
    arrays: Mapping[str, ArraySpec] | None = None  # parameters of a model that is not native
    offload: bool = False  # whether what does not fit is also tried with host memory
    batch_sizes: tuple[int, ...] = ()  # global batch sizes; none: that of the program
    tower: Tower | None = None  # of a program with images
    capacity: int | None = None  # bytes of a device that a step may use; None: the target's


def candidates(
    program: Program, attained: float | None = None, choices: SearchOptions = SearchOptions()
) -> Iterator[Candidate]:
    """Yield every strategy whose sizes divide, including those that do not fit in memory.

    Args:
        program: program with a native model.
        attained: fraction of the machine's peak FLOP/s that products and attention reach. Default:
            those of the target.
        choices: restrictions of the search.
    """
    load_rules = cache(Rules.load)  # once for this search, also the user's files
    configured = program.batch.global_batch_size
    for size in choices.batch_sizes or (configured,):
        batch = replace(program.batch, global_batch_size=size, microbatches=1, padding_sequences=0)
        for candidate in _of_batch(replace(program, batch=batch), load_rules, attained, choices):
            candidate.program.computed.clear()  # a search keeps many thousands of programs
            yield replace(candidate, relative_batch=size / configured)


def _of_batch(
    program: Program, load_rules: _LoadRules, attained: float | None, choices: SearchOptions
) -> Iterator[Candidate]:
    """Yield every strategy for the global batch of a program."""
    for sizes in _meshes(program, Target.parse(program.target).devices, choices):
        batch = replace(program.batch, microbatches=sizes["stage"])
        for names in _rules(program, sizes):
            settings = replace(program, mesh=Mesh(**sizes), rules=names, batch=batch)
            for pipeline in _pipelines(sizes["stage"], program, choices):
                settings = replace(settings, pipeline=pipeline)
                if not _chunk_divides(settings, MeshShape(sizes), load_rules(names)):
                    continue  # but it may with another schedule: 1F1B divides the positions
                resolved = replace(
                    resolve(settings, load_rules),
                    tower=choices.tower,
                    stands_for_imported=choices.arrays is not None,
                )
                try:
                    weights = shard_weights(resolved)
                    if (tower := tower_program(resolved)) is not None:
                        shard_weights(tower)
                    step_uses_flash_kernel(resolved)
                    check_optimizer(resolved)
                    if choices.arrays is not None:
                        arrays = state_arrays(choices.arrays, resolved.optimizer)
                        make_plan(arrays, resolved.rules, resolved.mesh)
                except (ShardingError, LoweringError):
                    break  # sizes do not divide or there is no kernel; the schedule is irrelevant
                estimate = partial(_candidate, weights, attained, choices.capacity)
                for variant in _variants(resolved, choices.remats):
                    yield (candidate := estimate(variant))
                    if choices.offload and not candidate.memory.fits:
                        yield from map(estimate, _offloaded(variant))


def _chunk_divides(program: Program, mesh: MeshShape, rules: Rules) -> bool:
    try:
        check_loss_chunk(program, mesh, rules)
    except ShardingError:
        return False
    return True


def _offloaded(program: ResolvedProgram) -> Iterator[ResolvedProgram]:
    """Yield a strategy with moments, activations or both in host memory; slower, but smaller."""
    settings, optimizer = program.settings, program.optimizer
    on_host = replace(optimizer, offload_to_host=True)
    yield program.with_settings(replace(settings, optimizer=on_host))
    if program.model.remat == "dots":
        model = replace(program.model, remat="offload")
        yield program.with_settings(replace(settings, model=model))
        yield program.with_settings(replace(settings, model=model, optimizer=on_host))


def _candidate(
    weights: Sequence[ShardedWeight],
    attained: float | None,
    capacity: int | None,
    program: ResolvedProgram,
) -> Candidate:
    estimated_memory = memory(program, weights)
    if capacity is not None:
        estimated_memory = replace(estimated_memory, capacity=capacity)
    if not estimated_memory.fits:
        return Candidate(program, estimated_memory)
    collectives = predict_collectives(program, weights)
    flash = step_uses_flash_kernel(program)
    achieved = None if attained is None else Achieved(attained, attained, tensor_overlap=0.0)
    estimated_time = step_time(
        program, estimated_memory, collectives, bubble_of(program), achieved, flash, weights=weights
    )
    if attained is None:
        moved = partial(moved_bytes, program, estimated_memory, flash, weights)
        estimated_time = with_profile(estimated_time, program, collectives, None, moved)
    seconds = estimated_time.total if estimated_time.is_complete else None
    utilization = mfu(program, seconds, causal=skips_scores(program, flash=flash))
    sent_bytes = sum(each.wire_bytes_per_step for each in collectives)
    return Candidate(program, estimated_memory, estimated_time, utilization, sent_bytes)


def _meshes(program: Program, devices: int, choices: SearchOptions) -> Iterator[dict[str, int]]:
    model, batch = program.model, program.batch
    widest = (
        _WIDEST_CONTEXT if batch.seq_len >= MIN_CONTEXT_PARALLEL_LENGTH and choices.context else 1
    )
    for tensor in divisors_up_to(devices, MAX_TENSOR):
        if indivisible_size(model, tensor):
            continue
        for stage in divisors_up_to(devices // tensor, model.layers):
            if stage > 1 and (model.layers % (stage * choices.period) or not choices.stages):
                continue
            for context in divisors_up_to(devices // tensor // stage, widest):
                if stage > 1 and context > 1 and not choices.stages_with_context:
                    continue
                copies = devices // tensor // stage // context
                if batch.global_batch_size % (copies * stage):
                    continue  # microbatches of a replica must be a multiple of the stages
                for sizes in _batch_axes(model, copies):
                    yield {**sizes, "stage": stage, "context": context, "tensor": tensor}


def _batch_axes(model: Model, devices: int) -> Iterator[dict[str, int]]:
    """Yield the sizes of data, fsdp and expert, the mesh axes that split the batch."""
    experts = model.moe.experts if model.moe else 1
    for expert in divisors_up_to(devices, experts):
        if experts % expert:
            continue
        for fsdp in divisors_up_to(devices // expert, devices):
            yield {"data": devices // expert // fsdp, "fsdp": fsdp, "expert": expert}


def indivisible_size(model: Model, tensor: int) -> str:
    """Return a model size that `tensor` does not divide, as "name = size"; empty if all divide."""
    assert model.kv_heads
    sizes = {"kv_heads": model.kv_heads, "mlp": model.mlp, "vocab": model.vocab}
    return next((f"{name} = {size}" for name, size in sizes.items() if size % tensor), "")


def _rules(program: Program, sizes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """Yield rule tables with variants for data and tensor; keep ulysses and the user's files."""
    context = "ulysses" if "ulysses" in program.rules else "context"
    user_files = [name for name in program.rules if name.endswith(".toml")]
    for first in ("data", "zero1", "zero2") if sizes["data"] > 1 else ("data",):
        for last in (["sequence"], []) if sizes["tensor"] > 1 else (["sequence"],):
            yield (first, "fsdp", "pipeline", "expert", context, "tensor", *last, *user_files)


def _variants(program: ResolvedProgram, remats: tuple[Remat, ...]) -> Iterator[ResolvedProgram]:
    """Yield variants in the number of microbatches and in remat."""
    settings, mesh = program.settings, program.mesh
    copies, stages = mesh.size(("data", "fsdp", "expert")), mesh.axes["stage"]
    for microbatches in divisors_up_to(
        program.batch.global_batch_size // copies, program.batch.global_batch_size
    ):
        if microbatches % stages or (microbatches == 1 and "zero2" in settings.rules):
            continue
        rows = program.batch.global_batch_size // microbatches
        if program.loss.kind == "dpo" and rows % 2:
            continue  # a pair of sequences must not be divided
        for remat in remats:
            if remat == "none" and not settings.pipeline.recompute_stages:
                continue  # without remat, no schedule but 1f1b recomputes stages
            varied_settings = replace(
                settings,
                model=replace(program.model, remat=remat),
                batch=replace(program.batch, microbatches=microbatches),
            )
            yield program.with_settings(varied_settings)


def _pipelines(stages: int, program: Program, choices: SearchOptions) -> Iterator[PipelineSettings]:
    """Yield pipeline schedules; GPipe is the circular one with one virtual stage."""
    if stages == 1:
        yield PipelineSettings()
        return
    # 1F1B splits the LM head's positions over the stages.
    splits = choices.one_f_one_b and program.batch.seq_len % stages == 0
    chunks = program.model.layers // (stages * choices.period)
    for virtual in divisors_up_to(chunks, _MAX_VIRTUAL_STAGES):
        if splits and virtual <= _MAX_INTERLEAVED_STAGES:
            yield PipelineSettings(schedule="1f1b", virtual_stages=virtual)
        for recompute in (True, False):
            yield PipelineSettings(
                schedule="circular", virtual_stages=virtual, recompute_stages=recompute
            )


def divisors_up_to(value: int, most: int) -> list[int]:
    """Return the divisors of `value` up to `most`, in ascending order."""
    return [divisor for divisor in divisors(value) if divisor <= most]
