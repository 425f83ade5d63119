"""Programs for fewer hosts than the target has: the mesh and the batch that keep a run the same.

`compile` and `run` both ask this module, so they always agree on the program for a number of hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import ceil

from graphtrain.api.checks.problem import Problem
from graphtrain.api.checks.program import program_problems
from graphtrain.config.phases import describe_placement, training_phases
from graphtrain.config.resolve import ResolvedProgram, resolve
from graphtrain.config.schema import Batch, Config, Mesh, Phase, Program
from graphtrain.config.schema.program import why_not_padded
from graphtrain.errors import ConfigError
from lowering.errors import LoweringError
from lowering.machine.target import Target
from sharding_rules.errors import ShardingError
from sharding_rules.mesh import MeshShape

_FALLBACK = ("run", "fallback")
_MAX_TRIED = 64  # numbers of hosts that are tried for a message


class _NoFallback(Exception):
    """There is no program for a number of hosts; the text says why."""


@dataclass(frozen=True)
class Fallback:
    """The program of a run on fewer hosts."""

    hosts: int
    program: ResolvedProgram

    def __str__(self) -> str:
        """Return the mesh and the batches in one line."""
        return f"{name_of_hosts(self.hosts)}: {describe_placement(self.program)}"


def name_of_hosts(hosts: int) -> str:
    """Return a number of hosts in words."""
    return f"{hosts} host{'s' * (hosts != 1)}"


def fallbacks(config: Config) -> list[Fallback]:
    """Return the programs of run.fallback, in the order of the setting.

    Raises:
        ConfigError: there is none for one of them.
    """
    return [fallback(config, hosts) for hosts in config.run.fallback]


def fallback_programs(config: Config) -> dict[str, ResolvedProgram]:
    """Return the programs of run.fallback by labels, for compilation.

    Raises:
        ConfigError: there is none for one of them.
    """
    return {name_of_hosts(one.hosts): one.program for one in fallbacks(config)}


def fallback(config: Config, hosts: int) -> Fallback:
    """Return the program of a run on fewer hosts.

    Raises:
        ConfigError: there is none; says which numbers of hosts can be used.
    """
    full = resolve(config.program)
    try:
        return Fallback(hosts, resolve(_on_hosts(full, hosts)))
    except _NoFallback as error:
        raise ConfigError(f"run.fallback: {error}{_remedy(full)}") from None


def on_hosts(config: Config, hosts: int) -> ResolvedProgram:
    """Return the program of a run for the number of hosts that there are.

    It is that of [program], unless run.fallback names the number.

    Raises:
        ConfigError: the number is in run.fallback, and there is no program for it.
    """
    program = resolve(config.program)
    if hosts == program.target.processes or hosts not in config.run.fallback:
        return program
    return fallback(config, hosts).program


def check_hosts(config: Config, hosts: int) -> None:
    """Check that a run can have a number of hosts.

    Raises:
        ConfigError: neither the target nor run.fallback has it; says what to set.
    """
    target = Target.parse(config.program.target)
    named = [str(count) for count in config.run.fallback]
    if not named or target.processes is None or hosts in (target.processes, *config.run.fallback):
        return  # without run.fallback, joining says how to start the processes of the target
    raise ConfigError(
        f"{name_of_hosts(hosts)} of {target.processes}: run.fallback = [{', '.join(named)}] does "
        f"not name {hosts}; start one of these numbers of processes, or add {hosts} to "
        "run.fallback and compile again"
    )


def fallback_problems(config: Config) -> Iterator[Problem]:
    """Yield each number of hosts in run.fallback for which there is no program."""
    counts = config.run.fallback
    if not counts:
        return
    if repeated := [count for count in dict.fromkeys(counts) if counts.count(count) > 1]:
        yield Problem("program", f"run.fallback names {repeated[0]} twice", (_FALLBACK,))
    for hosts in dict.fromkeys(counts):
        try:
            fallback(config, hosts)
        except ConfigError as error:
            yield Problem("program", str(error), (_FALLBACK,))


def _remedy(full: ResolvedProgram) -> str:
    """Say which numbers of hosts can be used."""
    possible = []
    most = (full.target.processes or 1) - 1
    for hosts in range(most, max(0, most - _MAX_TRIED), -1):
        try:
            _on_hosts(full, hosts)
        except _NoFallback:
            continue
        possible.append(str(hosts))
    return f"; hosts that can be used: {', '.join(possible)}" if possible else ""


def _on_hosts(full: ResolvedProgram, hosts: int) -> Program:
    """Return the settings of a program on fewer hosts, without anything that is known to be wrong.

    `fsdp` keeps its size, and `data` has what the other axes leave; where that is no whole number,
    `fsdp` has the largest size that every array allows. Other axes stay as they are.
    """
    count = full.target.processes
    try:
        target = full.target.with_hosts(hosts)
    except LoweringError as error:
        raise _NoFallback(str(error)) from None
    if count is None or hosts >= count:
        raise _NoFallback(f"{hosts} is not less than the {count} hosts of {full.target}")
    axes = dict(full.mesh.axes)
    fixed = full.mesh.devices // (axes["data"] * axes["fsdp"])
    replicas, remainder = divmod(target.devices, fixed)
    if remainder:
        named = " x ".join(
            f"mesh.{name} = {size}"
            for name, size in axes.items()
            if size > 1 and name not in ("data", "fsdp")
        )
        raise _NoFallback(
            f"{target} has {target.devices} devices, which is not a multiple of {named}; only "
            "mesh.data and mesh.fsdp can shrink"
        )
    reason = ""
    for data, fsdp in _replica_axes(replicas, axes["fsdp"]):
        mesh = replace(full.settings.mesh, **axes | {"data": data, "fsdp": fsdp})
        try:
            return _on_mesh(full, str(target), mesh)
        except _NoFallback as error:
            reason = reason or f"on {name_of_hosts(hosts)} ({target}): {error}"
    raise _NoFallback(reason)


def _replica_axes(replicas: int, fsdp: int) -> list[tuple[int, int]]:
    """Return pairs of data and fsdp with a product: that with the same fsdp, then by its size."""
    divisors = [size for size in range(replicas, 0, -1) if replicas % size == 0]
    if fsdp == 1:
        return [(replicas, 1)]
    return [(replicas // size, size) for size in sorted(divisors, key=lambda one: one != fsdp)]


def _on_mesh(full: ResolvedProgram, target: str, mesh: Mesh) -> Program:
    """Return the settings of a program on a mesh, with batches that the mesh divides."""
    *phases, last = training_phases(full)
    settings = replace(full.settings, target=target, mesh=mesh)
    batches = [
        _fit_batch(part.program, replace(part.program.settings, target=target, mesh=mesh))
        for part in (*phases, last)
    ]
    changed = tuple(
        _with_batch(phase, batch) for phase, batch in zip(full.phases, batches[:-1], strict=True)
    )
    program = replace(settings, batch=batches[-1], phase=changed or None)
    for problem in program_problems(program):
        raise _NoFallback(problem.message)
    return program


def _with_batch(phase: Phase, batch: Batch) -> Phase:
    return replace(
        phase, microbatches=batch.microbatches, padding_sequences=batch.padding_sequences
    )


def _fit_batch(full: ResolvedProgram, settings: Program) -> Batch:
    """Return the same global batch in microbatches that a smaller mesh divides.

    A device computes at most as many sequences at once as before. Of the possible numbers of
    microbatches, the one with the least padding, then the smallest.
    """
    axes = full.rules.activations.get("batch", ())
    before, now = full.mesh.size(axes), MeshShape(asdict(settings.mesh)).size(axes)
    batch = full.batch
    if before == now:
        return batch
    per_device = max(1, batch.microbatch_rows // before)
    least = ceil(batch.global_batch_size / now)  # sequences of each replica in a step
    first = ceil(least / per_device)
    may_pad = not why_not_padded(settings)
    candidates = sorted(
        range(first, (min(2 * first, least) if may_pad else least) + 1),
        key=lambda count: (count * ceil(least / count), count),
    )
    reasons = []
    for count in candidates:
        padding = count * ceil(least / count) * now - batch.global_batch_size
        try:
            fitted = replace(batch, microbatches=count, padding_sequences=padding)
            resolve(replace(settings, batch=fitted))
            return fitted
        except (ValueError, ShardingError) as error:
            reasons.append(str(error))
    if not may_pad:
        raise _NoFallback(
            f"batch.global_batch_size = {batch.global_batch_size} is not a multiple of {now} "
            f"replicas, and cannot be padded with {why_not_padded(settings)}"
        )
    raise _NoFallback(reasons[0])
