"""Profile of a run joined with its plan: predicted against measured time of each operation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

# Its modules declare which of their lines are reported as those of their callers.
import graphtrain.graphs.build  # noqa: F401
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.assessment import StepTime
from graphtrain.cost_model.communication_time import communication_seconds
from graphtrain.cost_model.compute import compiled_excess
from graphtrain.cost_model.memory import memory
from graphtrain.cost_model.native_equivalent import sizes_unknown
from graphtrain.cost_model.padded_stages import with_padding_layers
from graphtrain.cost_model.product_peaks import step_peak
from graphtrain.cost_model.time import step_time
from graphtrain.cost_model.traffic import bubble_of
from graphtrain.errors import TrainingError
from graphtrain.models.attention.kernel_support import step_uses_flash_kernel
from graphtrain.planning.scopes import scopes
from graphtrain.run.profiles.files import ProcessProfile, read_profile
from graphtrain.run.profiles.trace import MeasuredOperation, read_trace
from lowering.hlo.collectives import Collective, merged, read
from lowering.hlo.operations import Operation, program_name, read_operations
from lowering.machine.target import AT_PEAK
from sharding_rules.mesh import MeshShape

UNKNOWN = "not in the program"


@dataclass(frozen=True)
class CollectiveTime:
    """One collective of the compiled step, or several that differ only in their place."""

    collective: Collective  # with its executions in a step
    measured: float  # seconds of a step, mean of the devices; with the wait for the others
    fastest: float  # of the device that waited least: nearest to the time of the transfer
    predicted: float | None  # None: the bandwidth is unknown


@dataclass(frozen=True)
class KernelTime:
    """All kernels of one part of the model, without collectives."""

    part: str  # name scopes of the model, as in "mlp/gate+up"; "update" for the optimizer
    kind: str  # "products" or "other"
    operations: int  # different ones
    measured: float  # seconds of a step, mean of the devices
    flops: float  # of a step, on one device
    predicted: float | None  # of products; None: the peak is unknown, or they are none


@dataclass(frozen=True)
class Profile:
    """Measured and predicted time of the steps of a profile; seconds are those of one step."""

    directory: Path
    first_step: int
    last_step: int
    target: str
    devices: int  # that were traced
    processes: int
    measured_step: float
    predicted_step: float | None
    is_complete: bool  # whether the prediction has all parts; else it is a lower bound
    totals: Mapping[str, tuple[float, float | None]]  # measured and predicted, by kind of work
    collectives: Sequence[CollectiveTime]
    kernels: Sequence[KernelTime]
    traces: Sequence[Path]  # of each process


def joined_profile(directory: Path, program: ResolvedProgram, name: str | None = None) -> Profile:
    """Read a profile of a run and join it with what its plan predicts.

    Args:
        directory: Directory of the run.
        program: Program of the traced steps.
        name: Steps of the profile, "FIRST-LAST"; None for the last one.

    Raises:
        TrainingError: there is no such profile, it is damaged, or it is of another program.
    """
    profiles = read_profile(directory, name)
    facts = profiles[0].facts
    mesh = MeshShape(facts.mesh)
    if facts.target != str(program.target) or mesh.axes != program.mesh.axes:
        raise TrainingError(
            f"{profiles[0].path} is of {facts.target} with the mesh {facts.mesh}, and the settings "
            f"are of {program.target} with {dict(program.mesh.axes)}; give those of the profile "
            "with --target and --set"
        )
    text = profiles[0].program_text()
    operations = read_operations(text, mesh, program.target.slices)
    steps = facts.last_step - facts.first_step + 1
    measured, devices = _measured(profiles, program_name(text), operations)
    of_collectives = {name for name, one in operations.items() if one.collective is not None}
    collectives = _collectives(program, operations, measured, devices, steps)
    kernels = _kernels(program, operations, measured, devices, steps, of_collectives)
    time = _predicted(program, text, mesh, facts.peak_bytes)
    products = [one for one in kernels if one.kind == "products"]
    others = [one for one in kernels if one.kind == "other"]
    totals = {
        "products": (_sum(products), time and time.compute),
        "other kernels": (_sum(others), time and time.memory),
        "collectives": (sum(one.measured for one in collectives), _communication(time)),
    }
    return Profile(
        directory=directory,
        first_step=facts.first_step,
        last_step=facts.last_step,
        target=facts.target,
        devices=len(devices),
        processes=len(profiles),
        measured_step=max(one.facts.seconds for one in profiles) / steps,
        predicted_step=time and time.total,
        is_complete=time is not None and time.is_complete,
        totals=totals,
        collectives=collectives,
        kernels=kernels,
        traces=[one.trace for one in profiles],
    )


_Devices = list[tuple[int, str]]
_Seconds = dict[str, dict[tuple[int, str], float]]  # by operation and device


def _measured(
    profiles: Sequence[ProcessProfile], program: str, operations: Mapping[str, Operation]
) -> tuple[_Seconds, _Devices]:
    """Return the seconds of each operation on each device of all processes."""
    seconds: _Seconds = {}
    devices: dict[tuple[int, str], None] = {}
    containers: set[str] = set()
    for profile in profiles:
        found = read_trace(profile.trace, program)
        containers |= {one.name for one in found if _is_container(one, operations)}
        for one in found:
            device = profile.facts.rank, one.device
            devices[device] = None
            of_operation = seconds.setdefault(one.name, {})
            of_operation[device] = of_operation.get(device, 0.0) + one.seconds
    for name in containers:
        del seconds[name]
    return seconds, list(devices)


def _is_container(one: MeasuredOperation, operations: Mapping[str, Operation]) -> bool:
    """Return whether the time of an operation is that of others inside it."""
    base = one.name.partition(".")[0]
    return one.name not in operations and base in ("while", "conditional", "call")


def _collectives(
    program: ResolvedProgram,
    operations: Mapping[str, Operation],
    measured: _Seconds,
    devices: _Devices,
    steps: int,
) -> list[CollectiveTime]:
    """Return the collectives of a step, those first that take longest."""
    groups: dict[Collective, list[Operation]] = {}
    for one in operations.values():
        if one.collective is not None:
            groups.setdefault(one.collective, []).append(one)
    times = []
    for of_one, members in groups.items():
        count = sum(one.count for one in members)
        (collective,) = merged([of_one] * count)
        by_device = [
            sum(measured.get(one.name, {}).get(device, 0.0) for one in members) / steps
            for device in devices
        ]
        predicted = communication_seconds([collective], program.mesh, program.target)
        (seconds,) = predicted.values()
        mean = sum(by_device) / len(by_device)
        times.append(CollectiveTime(collective, mean, min(by_device), seconds))
    return sorted(times, key=lambda one: -one.measured)


def _kernels(
    program: ResolvedProgram,
    operations: Mapping[str, Operation],
    measured: _Seconds,
    devices: _Devices,
    steps: int,
    of_collectives: set[str],
) -> list[KernelTime]:
    """Return the groups of kernels, those first that take longest."""
    groups: dict[tuple[str, str], list[tuple[Operation | None, float]]] = {}
    for name, by_device in measured.items():
        base = name.partition(".")[0].removesuffix("-done")
        if name in of_collectives or base in _WAITS:
            continue
        one = operations.get(name)
        seconds = sum(by_device.values()) / len(devices) / steps
        groups.setdefault(_group(one), []).append((one, seconds))
    rate = _product_flops_per_second(program)
    kernels = []
    for (part, kind), members in groups.items():
        flops = sum(one.flops * one.count for one, _ in members if one is not None)
        predicted = flops / rate if flops and rate else None
        seconds = sum(seconds for _, seconds in members)
        kernels.append(KernelTime(part, kind, len(members), seconds, flops, predicted))
    return sorted(kernels, key=lambda one: -one.measured)


_WAITS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def _group(operation: Operation | None) -> tuple[str, str]:
    """Return the part of the model of an operation, and its kind."""
    if operation is None:
        return UNKNOWN, "other"
    found = scopes(operation.scope)
    names = found[0].names if found else ()
    if operation.flops:
        return "/".join(names) or "layers", "products"
    if names:
        return names[0], "other"
    is_update = not found or found[0].phase == "update"
    return "update" if is_update else "layers", "other"


def _product_flops_per_second(program: ResolvedProgram) -> float:
    """Return the rate of one device that the plan assumes; 0 if it is unknown."""
    achieved = program.target.achieved or AT_PEAK
    return step_peak(program, achieved) / program.target.devices


def _predicted(
    program: ResolvedProgram, text: str, mesh: MeshShape, peak_bytes: int
) -> StepTime | None:
    """Return the time of a step that a plan of the compiled program predicts; None if unknown."""
    if sizes_unknown(program.settings):
        return None
    facts = read(text, mesh, program.target.slices)
    padded, bubble = with_padding_layers(program), bubble_of(program)
    flash = step_uses_flash_kernel(padded)
    excess = None
    if facts.flops:
        excess = compiled_excess(padded, facts.flops, flash=flash, bubble=bubble)
    held = replace(memory(padded), peak=peak_bytes)
    return step_time(padded, held, facts.collectives, bubble, flash=flash, excess=excess)


def _communication(time: StepTime | None) -> float | None:
    if time is None or None in time.communication.values():
        return None
    return sum(seconds or 0.0 for seconds in time.communication.values())


def _sum(kernels: Iterable[KernelTime]) -> float:
    return sum(one.measured for one in kernels)
