"""Detection of Ascend's software on this machine, without importing it."""

import ctypes.util
import os
from pathlib import Path

from lowering.machine.extras import install_command, is_installed
from lowering.machine.target import Target

INSTALL_COMMAND = install_command("ascend")

_RUNTIME = "ge_runner"  # the library of CANN that MindSpore's plugin loads first


def missing_software(target: Target) -> str:
    """Return the software that this machine lacks to run a target, and how to get it; or ""."""
    if not has_mindspore():
        return f"MindSpore ({INSTALL_COMMAND})"
    if not target.runs_on_cpu and not has_cann():
        return "CANN (source its set_env.sh where it is installed)"
    return ""


def has_mindspore() -> bool:
    """Return whether MindSpore is installed."""
    return is_installed("mindspore")


def has_cann() -> bool:
    """Return whether CANN's libraries can be found, by LD_LIBRARY_PATH or the system's linker."""
    directories = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    exists = (
        Path(directory, f"lib{_RUNTIME}.so").exists() for directory in filter(None, directories)
    )
    return any(exists) or ctypes.util.find_library(_RUNTIME) is not None
