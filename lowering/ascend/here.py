"""What of Ascend's software is on this machine, without importing any of it."""

import ctypes.util
import importlib.util
import os
from pathlib import Path

from lowering.machine.target import Target

INSTALL = "pip install 'graphtrain[ascend]'"

_RUNTIME = "ge_runner"  # the library of CANN that MindSpore's plugin asks for first


def lacks(target: Target) -> str:
    """What a run of a target lacks on this machine, and what brings it; empty if nothing."""
    if not has_mindspore():
        return f"MindSpore ({INSTALL})"
    if not target.runs_on_cpu and not has_cann():
        return "CANN (source its set_env.sh where it is installed)"
    return ""


def has_mindspore() -> bool:
    return importlib.util.find_spec("mindspore") is not None


def has_cann() -> bool:
    """Whether CANN's libraries would be found, by path or by the system's own list."""
    directories = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    found = (Path(one, f"lib{_RUNTIME}.so").exists() for one in filter(None, directories))
    return any(found) or ctypes.util.find_library(_RUNTIME) is not None
