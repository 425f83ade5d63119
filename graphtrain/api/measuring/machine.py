"""Measure this machine in processes of their own, and put the results together."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from graphtrain.cost_model.machine_profile import (
    BUSY,
    MachineProfile,
    check_writable,
    profiles_path,
    read_profiles,
    store_profile,
    this_machine,
)
from graphtrain.errors import PlanError
from graphtrain.files import validate
from lowering.machine import host
from sharding_rules.documents import parse_object

_WATCHED_SECONDS = 2.0
_DEVICES = (1, 2, 4, 8)  # of which collectives are measured, from 2 on
_PATIENCE = 1.5  # seconds that each measurement waits for cores at full speed


def measure_machine(
    observe: Callable[[str], None] = lambda subject: None, *, even_if_busy: bool = False
) -> MachineProfile:
    """Measure this machine's CPU, which takes a minute or two.

    Where others on the host of a virtual machine slow its cores, it takes up to four minutes more:
    measurements then wait for the full speed.

    Args:
        observe: called with what is measured next.
        even_if_busy: measure although other processes use the cores.

    Raises:
        PlanError: other processes use the cores, before or meanwhile, or a measurement failed.
    """
    if not even_if_busy:
        before = CoreUse.now()
        time.sleep(_WATCHED_SECONDS)
        _refuse_busy(used_by_others(before), "use")
    before = CoreUse.now()
    found: dict[str, Any] = {"collectives": [], "slow": 0.0}
    for devices in _DEVICES:
        measured = _in_process(devices, observe)
        found["collectives"] += measured.pop("collectives", [])
        found["slow"] = round(max(found["slow"], measured.pop("slow")), 3)
        found |= measured
    busy = used_by_others(before)
    if not even_if_busy:
        _refuse_busy(busy, "used")
    empty = this_machine()
    about = {name: value for name, value in vars(empty).items() if name not in found}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    about |= {"busy": None if busy is None else round(busy, 3), "measured_at": now}
    return validate(MachineProfile, about | found)


def _refuse_busy(busy: float | None, use: str) -> None:
    """Refuse a machine whose cores other processes use, or may use without being seen.

    Raises:
        PlanError: they do.
    """
    if busy is None:
        raise PlanError(
            "the system does not say whether other processes use the cores; add --even-if-busy "
            "if none does"
        )
    if busy > BUSY:
        raise PlanError(
            f"other processes {use} {busy:.0%} of the cores, and their work would be in the "
            "measured times; measure when the machine is idle, or add --even-if-busy"
        )


def measure_and_store(
    observe: Callable[[str], None] = lambda subject: None, *, even_if_busy: bool = False
) -> tuple[Path, MachineProfile]:
    """Measure this machine, and store the profile where plans find it; see measure_machine().

    Raises:
        PlanError: as measure_machine(), or the file of profiles cannot be read or written.
    """
    path = profiles_path()
    read_profiles(path)  # before the minute, as the next
    check_writable(path)
    profile = measure_machine(observe, even_if_busy=even_if_busy)
    try:
        store_profile(path, profile)
    except OSError as error:
        raise PlanError(f"{path}: cannot be written: {error.strerror}") from None
    return path, profile


@dataclass(frozen=True)
class CoreUse:
    """Seconds of the cores on which this process may run, since they started."""

    busy: float
    everything: float
    own: float  # of this process and those of its children that have ended

    @classmethod
    def now(cls) -> CoreUse | None:
        """Return the seconds until now; None where the system does not say them."""
        import psutil

        try:
            times = psutil.cpu_times(percpu=True)
        except OSError:
            return None
        cpus = host.usable_cpus()
        # The list has the CPUs that are switched on; with others off, its places are no numbers.
        mine = [one for at, one in enumerate(times) if at in cpus or len(times) != os.cpu_count()]
        busy, everything = (sum(one) for one in zip(*map(_seconds, mine), strict=True))
        return cls(busy, everything, sum(os.times()[:4]))


def _seconds(times: Any) -> tuple[float, float]:
    """Return seconds in which one CPU worked, and all its seconds."""
    everything = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return everything - times.idle - getattr(times, "iowait", 0.0), everything


def used_by_others(before: CoreUse | None) -> float | None:
    """Return the share of the usable cores that others have used since; None where unknown."""
    now = CoreUse.now()
    if before is None or now is None:
        return None
    everything = now.everything - before.everything
    others = now.busy - before.busy - (now.own - before.own)
    return max(0.0, others) / everything if everything else 0.0


def _in_process(devices: int, observe: Callable[[str], None]) -> dict[str, Any]:
    """Measure in a process with a number of devices; it is ended if waiting for it is."""
    worker = [sys.executable, "-m", "graphtrain.api.measuring.worker"]
    command = [*worker, str(devices), str(_PATIENCE)]
    # A file, because nothing reads a pipe until the process has ended its messages.
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True) as process,
    ):
        try:
            messages = list(_messages(process, observe))
            status = process.wait()
        except BaseException:  # a signal too: it would go on for a minute, on all cores
            process.kill()
            raise
        output.seek(0)
        found = output.read()
    if status != 0:
        tail = "".join(messages[-5:])
        ended = f"was ended by signal {-status}" if status < 0 else "failed"
        raise PlanError(f"the process that measures with {devices} devices {ended}: {tail}")
    return parse_object(found)


def _messages(process: subprocess.Popen[str], observe: Callable[[str], None]) -> Iterator[str]:
    """Yield the lines of stderr, and pass on those that say what is measured."""
    assert process.stderr
    for line in process.stderr:
        if line.startswith("measuring "):
            observe(line.removeprefix("measuring ").strip())
        yield line
