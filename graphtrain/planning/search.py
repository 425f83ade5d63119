"""Search all strategies for a model and a batch on a target, ranked by estimate.

Sizes that do not divide are never built. Strategies that do not fit in memory are not ranked; the
result contains the reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

from graphtrain.compile.tasks import Observer
from graphtrain.config.phase_settings import without_phases
from graphtrain.config.schema import Mesh, Model, PipelineSettings, Program, SearchSettings
from graphtrain.config.schema.program import reason_of
from graphtrain.cost_model.native_equivalent import with_native_model
from graphtrain.errors import PlanError
from graphtrain.models.attention.kernel_support import AttentionSpec, uses_flash_kernel
from graphtrain.planning.candidate import Candidate
from graphtrain.planning.candidates import SearchOptions, candidates
from graphtrain.planning.given import without_strategy
from graphtrain.planning.limits import batch_sizes, usable_bytes
from graphtrain.planning.rejections import rejection_reasons
from lowering.machine.target import Target

if TYPE_CHECKING:
    from graphtrain.planning.imported import TorchSearch

_OBSERVED = 5_000  # strategies, between two words about the progress

FAMILIES = (
    "tensor",
    "stage",
    "context",
    "expert",
    "fsdp",
    "zero",
    "sequence",
    "schedule",
    "remat",
    "moments",
)
_NO_LIMITS = SearchSettings()
_STAGES_WITH_CONTEXT, _ONE_F_ONE_B = "stage with context", "schedule 1f1b"
_OFFLOADED = (
    "tried, because nothing fits without it: transfers of moments to host memory and back take "
    "time, and those of activations where they exceed compute"
)


@dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    program: Program  # with a native model
    ranked: tuple[Candidate, ...]  # candidates that fit, fastest first by estimate
    best_of: Mapping[float, Mapping[tuple[str, str], Candidate]]  # as in _Tally
    not_tried: Mapping[str, str]  # choices that were ruled out, with the reason
    considered: int  # number of candidates
    seconds: float  # duration of the search
    batches: tuple[Candidate, ...] = ()  # the best with each global batch, if several were tried
    compiled: tuple[Candidate, ...] = ()  # those that compile_best assessed, best first

    @property
    def winner(self) -> Candidate | None:
        """Return the fastest strategy: of the compiled ones if one fits, else by estimate."""
        compiled = [one for one in self.compiled if one.fits]
        return next(iter(compiled or self.ranked[len(self.compiled) :]), None)

    @property
    def compared_batch(self) -> float:
        """Return the global batch of the compared strategies, over that of the configuration."""
        return min(self.best_of) if self.winner is None else self.winner.relative_batch

    @property
    def rejected(self) -> dict[str, str]:
        """Return why the best strategy with each choice, as "tensor 16", is not the fastest."""
        of_batch = self.best_of[self.compared_batch]
        reasons = rejection_reasons(self.program, self.winner, of_batch, self.compiled)
        return reasons | dict(self.not_tried)


@dataclass(frozen=True)
class _Task:
    """Program and choices of a search."""

    program: Program  # with a native model
    choices: SearchOptions
    not_tried: dict[str, str]  # mesh axes that are ruled out, with the reason
    imported: TorchSearch | None  # whose model the native one stands for

    @classmethod
    def of(cls, program: Program, settings: SearchSettings) -> _Task:
        sizes = batch_sizes(program, settings)
        capacity = usable_bytes(Target.parse(program.target), settings)
        last = without_phases(program)
        if last.batch.padding_sequences:
            raise PlanError(
                "plan search tries batches that fill the mesh, without padding; add --set "
                "program.batch.padding_sequences=0, or plan the mesh with graphtrain plan"
            )
        given = without_strategy(last)
        native = with_native_model(given)
        imported, choices, not_tried = None, SearchOptions(), _ruled_out(given)
        if native is not given:
            from graphtrain.planning.imported import TorchSearch

            imported = TorchSearch.of(given)
            choices, not_tried = imported.choices, not_tried | imported.not_tried
        choices = replace(
            choices,
            stages="stage" not in not_tried,
            context="context" not in not_tried,
            stages_with_context=_STAGES_WITH_CONTEXT not in not_tried,
            one_f_one_b=_ONE_F_ONE_B not in not_tried,
            batch_sizes=sizes,
            capacity=capacity,
        )
        return cls(native, choices, not_tried, imported)


@dataclass
class _Tally:
    """Candidates so far: those that fit, and by global batch the best with each choice."""

    considered: int = 0
    fitting: list[Candidate] = field(default_factory=list)
    best_of: dict[float, dict[tuple[str, str], Candidate]] = field(default_factory=dict)

    def add(self, candidate: Candidate) -> None:
        self.considered += 1
        if candidate.memory.fits:
            self.fitting.append(candidate)
        best_of = self.best_of.setdefault(candidate.relative_batch, {})
        for family in FAMILIES:
            member = family, candidate.choice(family)
            if member not in best_of or _is_better(candidate, best_of[member]):
                best_of[member] = candidate

    @property
    def best_by_batch(self) -> tuple[Candidate, ...]:
        """Return the best candidate with each global batch."""
        groups = (best_of.values() for best_of in self.best_of.values())
        return tuple(reduce(lambda a, b: b if _is_better(b, a) else a, group) for group in groups)


def search(
    program: Program,
    keep: int = 20,
    settings: SearchSettings = _NO_LIMITS,
    observe: Observer = lambda label, stage: None,
) -> SearchResult:
    """Rank the strategies for a program's model, batch and target, without compiling.

    Args:
        program: the program whose strategy is varied; of a run with phases, its last part.
        keep: number of strategies to return; of several with equal numbers, only the first.
        settings: limits: the largest global batch, and the memory of a device.
        observe: Called with the number of strategies so far, of a long search.

    Raises:
        LoweringError: unknown target.
        LoweringError: attention = "flash", and the target has no such kernel for the model.
        PlanError: no strategy divides the model and the batch, a limit is impossible, or the model
            is imported and its sizes are unknown.
    """
    start_time, task, tally = time.perf_counter(), _Task.of(program, settings), _Tally()
    for candidate in _observed(candidates(task.program, choices=task.choices), observe):
        tally.add(candidate)
    if tally.considered and not tally.fitting and _can_offload(program):
        tally, offload = _Tally(), replace(task.choices, offload=True)
        for candidate in _observed(candidates(task.program, choices=offload), observe):
            tally.add(candidate)
        task.not_tried["offload"] = _OFFLOADED
    if not tally.considered:
        _check_kernel(task.program)
        raise PlanError(
            f"no strategy divides batch.global_batch_size = {program.batch.global_batch_size} and "
            "the model over "
            f"{program.target}; choose a batch that is a multiple of the number of devices"
        )
    ranked = _folded(sorted(tally.fitting, key=lambda candidate: candidate.rank))[:keep]
    if task.imported is not None:
        ranked = [task.imported.with_torch_model(candidate) for candidate in ranked]
    return SearchResult(
        program=task.program,
        ranked=tuple(ranked),
        best_of=tally.best_of,
        not_tried=task.not_tried,
        considered=tally.considered,
        seconds=time.perf_counter() - start_time,
        batches=tally.best_by_batch if len(task.choices.batch_sizes) > 1 else (),
    )


def _observed(found: Iterator[Candidate], observe: Observer) -> Iterator[Candidate]:
    """Yield candidates, and say now and then how many there were."""
    count = 0
    for count, candidate in enumerate(found, 1):
        if count % _OBSERVED == 0:
            observe("search", f"{count:,} strategies")
        yield candidate
    if count >= _OBSERVED:
        observe("search", "searched")


def _check_kernel(program: Program) -> None:
    """Check that attention has its kernel on one device, if the setting requires one."""
    model = program.model
    if isinstance(model, Model) and model.attention == "flash":
        spec = AttentionSpec.of(model, program.batch.seq_len)
        uses_flash_kernel("flash", spec, Target.parse(program.target))


def _can_offload(program: Program) -> bool:
    """Return whether the platform has host memory beside that of the device."""
    target = Target.parse(program.target)
    return target.is_gpu or target.platform == "tpu"


def _ruled_out(program: Program) -> dict[str, str]:
    """Return the choices with which the settings of a program cannot be used, with the reason.

    Args:
        program: program of without_strategy().
    """
    stages, reasons = Mesh(stage=2), {}
    if reason := _refusal(program, mesh=Mesh(context=2)):
        reasons["context"] = reason
    if reason := _refusal(program, mesh=stages):
        return reasons | {"stage": reason}
    if reason := _refusal(program, mesh=stages, pipeline=PipelineSettings(schedule="1f1b")):
        reasons[_ONE_F_ONE_B] = reason
    both = "context" not in reasons and _refusal(program, mesh=Mesh(stage=2, context=2))
    return reasons | ({_STAGES_WITH_CONTEXT: both} if both else {})


def _refusal(program: Program, *, mesh: Mesh, **changes: Any) -> str:
    """Return why a program cannot have a mesh and other changes; empty if it can."""
    batch = program.batch
    if mesh.stage != 1:
        rows = 2 * batch.global_batch_size  # whatever the batch is, two microbatches of pairs
        batch = replace(batch, global_batch_size=rows, microbatches=2)
    try:
        replace(program, mesh=mesh, batch=batch, **changes)
    except ValueError as error:
        return f"not tried: {reason_of(error)}"
    return ""


def _folded(ranked: Sequence[Candidate]) -> list[Candidate]:
    """Fold candidates whose printed numbers are equal into the first of them."""
    groups: dict[tuple[str, ...], list[Candidate]] = {}
    for candidate in ranked:
        groups.setdefault(candidate.figures, []).append(candidate)
    return [replace(first, equal=len(others)) for first, *others in groups.values()]


def _is_better(candidate: Candidate, incumbent: Candidate) -> bool:
    """Return whether `candidate` is better: fits, or is faster, or is smaller if neither fits."""
    if candidate.memory.fits != incumbent.memory.fits:
        return candidate.memory.fits
    if candidate.memory.fits:
        return candidate.rank < incumbent.rank
    return candidate.memory.peak < incumbent.memory.peak
