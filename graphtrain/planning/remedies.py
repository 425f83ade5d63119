"""Remedies: the cheapest changes of settings that make a program fit in device memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from graphtrain.cache import Cache
from graphtrain.compile.tasks import Observer
from graphtrain.config.render import toml
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.assessment import Assessment
from graphtrain.cost_model.padded_stages import with_padding_layers
from graphtrain.models.lora.trainable import frozen_arrays, trained_arrays
from graphtrain.models.shapes import state_arrays
from graphtrain.planning.assess import assess_all, estimate
from sharding_rules.errors import UserError
from sharding_rules.plan import make_plan

# A change of settings, as arguments of --set: ("program.model.remat=full",).
Change = tuple[str, ...]
# Returns the program with changed settings; raises ConfigError if they are invalid.
WithOverrides = Callable[[Sequence[str]], ResolvedProgram]

_MAX_REMEDIES = 3  # number of remedies to return
_COMPILATIONS = 6  # maximum number of candidates to compile
_REMAT = ("none", "attention", "dots", "full")  # in order of decreasing memory
_FAMILIES = 3  # maximum number of families to change at once


@dataclass(frozen=True)
class Remedy:
    """A change of settings with which the program fits, and its assessment."""

    change: Change
    assessment: Assessment

    @property
    def confirmed(self) -> bool:
        """True if a compilation confirmed it."""
        return self.assessment.memory.source == "compiler"

    @property
    def devices(self) -> int:
        return self.assessment.plan.mesh.devices

    @property
    def device_seconds(self) -> float | None:
        """Cost of a step: step time multiplied by the number of devices; None if unknown."""
        seconds = self.assessment.time.total
        return None if seconds is None else seconds * self.devices


def find_remedies(
    failed: Assessment,
    program: ResolvedProgram,
    vary: WithOverrides,
    cache: Cache,
    *,
    confirm: bool = True,
    observe: Observer = lambda label, stage: None,
) -> list[Remedy]:
    """Return changes that fit: same number of devices first, then by device-seconds per step.

    Candidates are estimated; the estimate is scaled by its error for the original program. The best
    are compiled, and those that do not fit then are left out.
    """
    candidates = _fitting_candidates(failed, program, vary)
    if not confirm:
        return candidates[:_MAX_REMEDIES]
    confirmed_remedies: list[Remedy] = []
    tried = 0
    while candidates[tried:] and len(confirmed_remedies) < _MAX_REMEDIES and tried < _COMPILATIONS:
        batch = candidates[
            tried : tried + min(_MAX_REMEDIES - len(confirmed_remedies), _COMPILATIONS - tried)
        ]
        tried += len(batch)
        programs = {" ".join(remedy.change): vary(remedy.change) for remedy in batch}
        assessed = assess_all(programs, cache, observe)
        compiled = (
            replace(remedy, assessment=assessed[" ".join(remedy.change)]) for remedy in batch
        )
        confirmed_remedies += [remedy for remedy in compiled if remedy.assessment.memory.fits]
    return confirmed_remedies


def _fitting_candidates(
    failed: Assessment, program: ResolvedProgram, vary: WithOverrides
) -> list[Remedy]:
    """Return fitting changes by estimate: single ones, then combinations until enough are found."""
    error = max(1.0, failed.memory.peak / _estimate(program).memory.peak)
    families = [list(family) for family in _families(program)]
    remedies: list[Remedy] = []
    for combination_size in range(1, _FAMILIES + 1):
        for chosen_families in itertools.combinations(families, combination_size):
            for changes in itertools.product(*chosen_families):
                change = tuple(setting for family_change in changes for setting in family_change)
                try:
                    assessment = _estimate(vary(change))
                except UserError:
                    continue  # an invalid combination of settings
                if assessment.memory.peak * error <= assessment.memory.capacity:
                    remedies.append(Remedy(change, assessment))
        if len(remedies) >= _MAX_REMEDIES:
            break
    device_count = failed.plan.mesh.devices
    return sorted(
        remedies,
        key=lambda remedy: (
            remedy.devices > device_count,
            remedy.assessment.time.host is None,  # nobody knows how long its transfers take
            remedy.device_seconds or 0.0,
        ),
    )


def _estimate(program: ResolvedProgram) -> Assessment:
    """Estimate a program without tracing, in less than a millisecond."""
    filled = with_padding_layers(program)
    arrays = state_arrays(trained_arrays(filled.settings), program.optimizer)
    arrays |= {f"frozen/{path}": spec for path, spec in frozen_arrays(filled).items()}
    return estimate(program, make_plan(arrays, program.rules, program.mesh))


def _families(program: ResolvedProgram) -> Iterator[Iterator[Change]]:
    """Yield families of changes; at most one change of each family is applied."""
    yield _remat(program)
    yield _microbatches(program)
    yield _optimizer(program)
    yield _mesh(program)
    yield _devices(program)


def _remat(program: ResolvedProgram) -> Iterator[Change]:
    current = program.model.remat
    current_index = _REMAT.index(current) if current in _REMAT else 0
    for remat in _REMAT[current_index + 1 :]:
        yield (f"program.model.remat={remat}",)
    if current != "offload" and program.target.platform != "cpu":
        yield ("program.model.remat=offload",)


def _microbatches(program: ResolvedProgram) -> Iterator[Change]:
    batch, shards = program.batch, program.mesh.size(("data", "fsdp"))
    count = 2 * batch.microbatches
    while count <= batch.global_batch_size // shards:
        yield (f"program.batch.microbatches={count}",)
        count *= 2


def _optimizer(program: ResolvedProgram) -> Iterator[Change]:
    if program.optimizer.moment_dtype == "float32" and program.optimizer.has_moment_dtype:
        yield ("program.optimizer.moment_dtype=bfloat16",)
    if not program.optimizer.offload_to_host and program.target.platform != "cpu":
        yield ("program.optimizer.offload_to_host=true",)


def _mesh(program: ResolvedProgram) -> Iterator[Change]:
    """Yield changes that shard weights, or their gradients and moments, further."""
    mesh, rules = program.mesh.axes, program.settings.rules
    if mesh["data"] > 1:
        for name in ("zero1", "zero2"):
            if name not in rules:
                yield (f"program.rules={toml([*rules, name])}",)
        yield (_mesh_change(mesh, data=1, fsdp="rest"),)
    if mesh["expert"] > 1 and with_padding_layers(program).model.moe is None:
        yield (_mesh_change(mesh, expert=1, fsdp="rest"),)
    tensor = 2 * mesh["tensor"]
    while tensor <= min(8, math.prod(mesh.values())):
        yield (_mesh_change(mesh, data=1, fsdp="rest", tensor=tensor),)
        tensor *= 2


def _mesh_change(mesh: object, **sizes: object) -> str:
    assert isinstance(mesh, dict)
    changed = {name: size for name, size in {**mesh, **sizes}.items() if size != 1}
    return f"program.mesh={toml(changed)}"


def _devices(program: ResolvedProgram) -> Iterator[Change]:
    """Yield changes to two and four times the devices, added to the fsdp axis."""
    target, mesh = program.target, program.mesh.axes
    sizes = list(target.topology)
    for _ in range(2):
        smallest = sizes.index(min(sizes))
        sizes[smallest] *= 2
        if target.platform == "tpu":
            sizes.sort()  # as the sizes of a slice are written
        yield (
            f"program.target={replace(target, topology=tuple(sizes))}",
            _mesh_change(mesh, fsdp="rest"),
        )
