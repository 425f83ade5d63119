"""Enumerate and estimate every strategy whose sizes divide a model, a batch and a machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from graphtrain.cache.sizes import format_size
from graphtrain.config.resolve import ResolvedProgram, resolve
from graphtrain.config.schema import Mesh, Model, PipelineSettings, Program, Remat
from graphtrain.cost_model.assessment import Memory, StepTime
from graphtrain.cost_model.memory import memory
from graphtrain.cost_model.time import mfu, step_time
from graphtrain.cost_model.traffic import bubble_of, predict_collectives
from graphtrain.cost_model.weights import ShardedWeight, shard_weights
from graphtrain.models.attention.kernel_support import step_uses_flash_kernel
from graphtrain.models.chunk_size import loss_chunk
from graphtrain.models.shapes import state_arrays
from graphtrain.planning.costs import Cost, Workload
from graphtrain.planning.formats import format_seconds, format_share
from lowering.errors import LoweringError
from lowering.machine.target import Achieved, Target
from sharding_rules.arrays import ArraySpec
from sharding_rules.errors import ShardingError
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import make_plan
from sharding_rules.rules import Rules

MAX_TENSOR = 64
MIN_CONTEXT_PARALLEL_LENGTH = (
    8192  # sequence length in tokens from which context parallelism is tried
)
_WIDEST_CONTEXT = 16
_MAX_VIRTUAL_STAGES = 8
_MAX_INTERLEAVED_STAGES = 2  # with 1F1B


@dataclass(frozen=True)
class Candidate:
    """One strategy and its estimate."""

    program: ResolvedProgram
    memory: Memory
    time: StepTime | None = None  # None if the program does not fit
    mfu: float | None = None  # None if unknown
    sent_bytes: float = 0.0  # by one device in a step
    equal: int = 0  # number of strategies with equal numbers that this one stands for

    @property
    def mesh(self) -> MeshShape:
        return self.program.mesh

    @property
    def seconds(self) -> float:
        """Known time of a step; infinite if the program does not fit."""
        return math.inf if self.time is None else self.time.known

    @property
    def rank(self) -> tuple[float, float, float, int]:
        """Sort key: step time to three digits, then communication, whose overlap is uncertain.

        Where the speed of the links is unknown, the bytes that are sent count.
        """
        times = self.time.communication.values() if self.time else ()
        sent = sum(seconds or 0.0 for seconds in times)
        return float(f"{self.seconds:.3g}"), sent, self.sent_bytes, self.memory.peak

    def cost(self, workload: Workload) -> Cost:
        """Return what a workload takes with this strategy."""
        return workload.cost(self.program.target, self.program.batch.tokens, self.time)

    @property
    def figures(self) -> tuple[str, str, str, str]:
        """Step time, utilization, bytes sent and peak memory as text."""
        return (
            format_seconds(None if self.time is None else self.time.total),
            format_share(self.mfu),
            format_size(round(self.sent_bytes)),
            format_size(self.memory.peak),
        )

    def choice(self, family: str) -> str:
        """Return the candidate's choice in a family, for example "16" for tensor."""
        rules, sizes = self.program.settings.rules, self.mesh.axes
        if family == "zero":
            return next((name[-1] for name in ("zero1", "zero2") if name in rules), "none")
        if family == "sequence":
            return "none" if sizes["tensor"] == 1 else "on" if "sequence" in rules else "off"
        if family == "schedule":
            pipeline = self.program.pipeline
            return (
                "none"
                if sizes["stage"] == 1
                else f"{pipeline.schedule} x {pipeline.virtual_stages}"
            )
        return self.program.model.remat if family == "remat" else str(sizes[family])

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of [program] that the candidate sets."""
        pipeline = self.program.pipeline
        staged = {"schedule": pipeline.schedule, "rounds": pipeline.virtual_stages}
        return {
            "mesh": {name: size for name, size in self.mesh.axes.items() if size > 1},
            "rules": list(self.program.settings.rules),
            "microbatches": self.program.batch.microbatches,
            "remat": self.program.model.remat,
            **({"pipeline": staged} if self.mesh.axes["stage"] > 1 else {}),
        }


@dataclass(frozen=True)
class SearchOptions:
    """Restrictions of the search for a kind of model."""

    stages: bool = True
    context: bool = True
    remats: tuple[Remat, ...] = ("none", "attention", "dots", "full")
    arrays: Mapping[str, ArraySpec] | None = None  # parameters of a model that is not native


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
    for sizes in _meshes(program, Target.parse(program.target).devices, choices):
        batch = replace(program.batch, microbatches=sizes["stage"])
        for names in _rules(program, sizes):
            settings = replace(program, mesh=Mesh(**sizes), rules=names, batch=batch)
            for pipeline in _pipelines(sizes["stage"], program):
                resolved = resolve(replace(settings, pipeline=pipeline), load_rules)
                try:
                    weights = shard_weights(resolved)
                    step_uses_flash_kernel(resolved)
                    loss_chunk(resolved)
                    if choices.arrays is not None:
                        arrays = state_arrays(choices.arrays, resolved.optimizer)
                        make_plan(arrays, resolved.rules, resolved.mesh)
                except (ShardingError, LoweringError):
                    break  # sizes do not divide or there is no kernel; the schedule is irrelevant
                for variant in _variants(resolved, choices.remats):
                    yield _candidate(variant, weights, attained)


def _candidate(
    program: ResolvedProgram, weights: Sequence[ShardedWeight], attained: float | None
) -> Candidate:
    estimated_memory = memory(program, weights)
    if not estimated_memory.fits:
        return Candidate(program, estimated_memory)
    collectives = predict_collectives(program, weights)
    flash = step_uses_flash_kernel(program)
    achieved = None if attained is None else Achieved(attained, attained, tensor_overlap=0.0)
    estimated_time = step_time(
        program, estimated_memory, collectives, bubble_of(program), achieved, flash
    )
    seconds = estimated_time.total if estimated_time.is_complete else None
    utilization = mfu(program, seconds, causal=flash)
    sent_bytes = sum(each.wire_bytes_per_step for each in collectives)
    return Candidate(program, estimated_memory, estimated_time, utilization, sent_bytes)


def _meshes(program: Program, devices: int, choices: SearchOptions) -> Iterator[dict[str, int]]:
    model, batch = program.model, program.batch
    widest = (
        _WIDEST_CONTEXT if batch.seq_len >= MIN_CONTEXT_PARALLEL_LENGTH and choices.context else 1
    )
    staged = choices.stages and not _without_stages(program)
    for tensor in divisors(devices, MAX_TENSOR):
        if indivisible_size(model, tensor):
            continue
        for stage in divisors(devices // tensor, model.layers):
            if model.layers % stage or (stage > 1 and not staged):
                continue
            for context in divisors(devices // tensor // stage, widest):
                copies = devices // tensor // stage // context
                if batch.global_batch_size % (copies * stage):
                    continue  # microbatches of a replica must be a multiple of the stages
                for sizes in _batch_axes(model, copies):
                    yield {**sizes, "stage": stage, "context": context, "tensor": tensor}


def _without_stages(program: Program) -> bool:
    """Return whether the program rules out a pipeline; see config.schema.check_pipeline."""
    return not program.batch.cross_document_attention or program.loss.has_chunks


def _batch_axes(model: Model, devices: int) -> Iterator[dict[str, int]]:
    """Yield the sizes of data, fsdp and expert, the mesh axes that split the batch."""
    experts = model.moe.experts if model.moe else 1
    for expert in divisors(devices, experts):
        if experts % expert:
            continue
        for fsdp in divisors(devices // expert, devices):
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
    for microbatches in divisors(
        program.batch.global_batch_size // copies, program.batch.global_batch_size
    ):
        if microbatches % stages or (microbatches == 1 and "zero2" in settings.rules):
            continue
        rows = program.batch.global_batch_size // microbatches
        if program.loss.kind == "dpo" and rows % 2:
            continue  # a pair of sequences must not be divided
        for remat in remats:
            varied_settings = replace(
                settings,
                model=replace(program.model, remat=remat),
                batch=replace(program.batch, microbatches=microbatches),
            )
            yield program.with_settings(varied_settings)


def _pipelines(stages: int, program: Program) -> Iterator[PipelineSettings]:
    if stages == 1:
        yield PipelineSettings()
        return
    for rounds in divisors(program.model.layers // stages, _MAX_VIRTUAL_STAGES):
        # 1F1B splits the LM head's positions over the stages.
        if program.batch.seq_len % stages == 0 and rounds <= _MAX_INTERLEAVED_STAGES:
            yield PipelineSettings(schedule="1f1b", virtual_stages=rounds)
        yield PipelineSettings(schedule="circular", virtual_stages=rounds)


def divisors(value: int, most: int) -> list[int]:
    """Return the divisors of `number` up to `most`, in ascending order."""
    return [divisor for divisor in range(1, min(value, most) + 1) if value % divisor == 0]
