"""Measure this machine in processes of their own, and put the results together."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from graphtrain.cost_model.machine_profile import (
    MachineProfile,
    profiles_path,
    read_profiles,
    store_profile,
    this_machine,
)
from graphtrain.errors import PlanError
from graphtrain.files import validate
from sharding_rules.documents import parse_object

_BUSY = 0.1  # share of the cores that others may use; above it, times are theirs, too
_WATCHED_SECONDS = 2.0
_DEVICES = (1, 2, 4, 8)  # of which collectives are measured, from 2 on


def measure_machine(
    observe: Callable[[str], None] = lambda subject: None, *, even_if_busy: bool = False
) -> MachineProfile:
    """Measure this machine's CPU, which takes about a minute.

    Args:
        observe: called with what is measured next.
        even_if_busy: measure although other processes use the cores.

    Raises:
        PlanError: other processes use the cores, or a measurement failed.
    """
    busy = used_by_others()
    if busy > _BUSY and not even_if_busy:
        raise PlanError(
            f"other processes use {busy:.0%} of the cores, and their work would be in the "
            "measured times; measure when the machine is idle, or add --even-if-busy"
        )
    found: dict[str, Any] = {"collectives": []}
    for devices in _DEVICES:
        measured = _in_process(devices, observe)
        found["collectives"] += measured.pop("collectives", [])
        found |= measured
    empty = this_machine()
    about = {name: value for name, value in vars(empty).items() if name not in found}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return validate(MachineProfile, about | found | {"busy": round(busy, 3), "measured_at": now})


def measure_and_store(
    observe: Callable[[str], None] = lambda subject: None, *, even_if_busy: bool = False
) -> tuple[Path, MachineProfile]:
    """Measure this machine, and store the profile where plans find it; see measure_machine().

    Raises:
        PlanError: as measure_machine(), or the file of profiles cannot be read or written.
    """
    path = profiles_path()
    read_profiles(path)  # before the minute
    profile = measure_machine(observe, even_if_busy=even_if_busy)
    try:
        store_profile(path, profile)
    except OSError as error:
        raise PlanError(f"{path}: cannot be written: {error.strerror}") from None
    return path, profile


def used_by_others(seconds: float = _WATCHED_SECONDS) -> float:
    """Return the share of this machine's cores that other processes use; 0.0 where unknown."""
    before, own = _cpu_times(), time.process_time()
    time.sleep(seconds)
    after, own = _cpu_times(), time.process_time() - own
    if before is None or after is None:
        return 0.0
    busy, everything = (late - early for late, early in zip(after, before, strict=True))
    return max(0.0, busy - own) / everything if everything else 0.0


def _cpu_times() -> tuple[float, float] | None:
    """Return seconds in which the cores worked, and all their seconds; None where unknown."""
    import psutil

    times = psutil.cpu_times()
    everything = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return everything - times.idle - getattr(times, "iowait", 0.0), everything


def _in_process(devices: int, observe: Callable[[str], None]) -> dict[str, Any]:
    """Measure in a process with a number of devices."""
    command = [sys.executable, "-m", "graphtrain.api.measuring.worker", str(devices)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    messages = list(_messages(process, observe))
    assert process.stdout
    output = process.stdout.read()
    if process.wait() != 0:
        tail = "".join(messages[-5:])
        raise PlanError(f"the process that measures {devices} devices failed: {tail}")
    return parse_object(output)


def _messages(process: subprocess.Popen[str], observe: Callable[[str], None]) -> Iterator[str]:
    """Yield the lines of stderr, and pass on those that say what is measured."""
    assert process.stderr
    for line in process.stderr:
        if line.startswith("measuring "):
            observe(line.removeprefix("measuring ").strip())
        yield line
