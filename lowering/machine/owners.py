"""Owners of leases and locks: what a process writes about itself, and whether it is still alive."""

import os
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


def this_process(host: str | None = None) -> dict[str, Any]:
    """Return what this process writes into a lease or lock that it owns.

    Args:
        host: unique id of this host; None: ask the kernel.
    """
    return {
        "pid": os.getpid(),
        "host": os.uname().nodename,
        "boot": host or _host_id(),
        "start": _start_time(os.getpid()),
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def describe(owner: Mapping[str, Any]) -> str:
    """Return an owner for a message: its process, its host, and since when it owns."""
    return f"process {owner.get('pid')} on {owner.get('host')}, since {owner.get('since')}"


def is_here(owner: Mapping[str, Any], host: str | None = None) -> bool:
    """Return whether the owner is or was a process of this host and container."""
    return owner.get("boot") == (host or _host_id()) and isinstance(owner.get("pid"), int)


def is_dead(owner: Mapping[str, Any], host: str | None = None) -> bool:
    """Return whether the owner was a process of this host and container that has ended."""
    pid = owner.get("pid")
    if not is_here(owner, host) or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # the process belongs to another user
    starts = {owner.get("start"), _start_time(pid)} - {None}
    return len(starts) == 2 or _is_zombie(pid)  # 2: the process id was given to another process


def _start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None where there is no /proc."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _is_zombie(pid: int) -> bool:
    """Return whether a process has ended but its parent has not collected its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] in ("Z", "X")
    except OSError:
        return False


@cache
def _host_id() -> str:
    """Return an id of this host, boot and container.

    Process ids are comparable only within one boot of a kernel and one PID namespace.
    """
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return os.uname().nodename
