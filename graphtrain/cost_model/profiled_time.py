"""Time of a step by the profile of this machine, where it has one that fits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.assessment import StepTime
from graphtrain.cost_model.machine_profile import (
    MachineProfile,
    profile_of_this_machine,
    profiles_path,
)
from graphtrain.cost_model.measured_time import MeasuredTime, MissingKind, measured_time
from graphtrain.cost_model.profiled_estimate import time_at_speeds_of
from lowering.hlo.work import ProgramWork

if TYPE_CHECKING:
    from lowering.hlo.collectives import Collective

_ADVICE = "graphtrain doctor --measure measures it"


def with_profile(
    time: StepTime,
    program: ResolvedProgram,
    collectives: Iterable[Collective],
    record: Mapping[str, Any] | None,
    moved_bytes: Callable[[], float],
) -> StepTime:
    """Return the time by the profile of this machine; without one, the time with the reason.

    Only for targets that are this machine's CPU, in one process. A step that is not compiled is
    estimated at the profile's speeds.

    Args:
        time: The estimate without a profile.
        program: The program, with a native model.
        collectives: What its devices send, read from the compiled program or predicted.
        record: Record of the compiled program; None if it is not compiled.
        moved_bytes: Returns what an estimate takes a device to read and write outside of products;
            only called for an estimate at a profile's speeds.

    Raises:
        PlanError: the file of profiles cannot be read.
    """
    if program.target.machine != "cpu":
        return time
    if record is not None and "work" not in record:
        return replace(time, profile_note="the record of the compiled step does not have its work")
    if program.target.processes != 1:
        return replace(time, profile_note="profiles have no collectives between processes")
    profile, reason = current_profile()
    if profile is None:
        return replace(time, profile_note=f"{reason}; {_ADVICE}")
    try:
        if record is None:
            return time_at_speeds_of(profile, time, program, collectives, moved_bytes())
        work = ProgramWork.from_record(record["work"])
        return _step_time(measured_time(work, collectives, profile, program.target.devices))
    except MissingKind as error:
        reason = f"the profile lacks loops of the kind {error.args[0]}"
        return replace(time, profile_note=f"{reason}; {_ADVICE} again")
    except KeyError as error:
        return replace(time, profile_note=f"no profile has measured {error.args[0]}")


def _step_time(measured: MeasuredTime) -> StepTime:
    sent = {axes: part.clock for axes, part in measured.communication.items()}
    return StepTime(
        compute=measured.products.clock,
        memory=measured.loops.clock,
        communication=sent,
        bubble=0.0,  # the compiled program has all ticks of a pipeline
        overlapped=0.0,
        starting=measured.overheads.clock,
        measured=measured,
    )


def current_profile() -> tuple[MachineProfile | None, str]:
    """Return the profile of this machine, or None and the reason why there is none.

    Raises:
        PlanError: the file of profiles cannot be read.
    """
    path = profiles_path()
    try:
        state = path.stat()
    except OSError:
        return profile_of_this_machine(path)
    return _profile(path, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=1)
def _profile(path: Path, modified: int, size: int) -> tuple[MachineProfile | None, str]:
    """Read one version of the file, which its time and size identify."""
    return profile_of_this_machine(path)
