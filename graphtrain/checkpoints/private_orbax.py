"""Private interfaces of Orbax and TensorStore: all that this project uses, one function for each.

They are names, files and behaviour that the documentation does not promise. All were tried with
orbax-checkpoint 0.12.8 and tensorstore 0.1.86. tests/unit/test_private_orbax.py calls each one and
says what to do when it breaks.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharding_rules.documents import read_json

_STEP = re.compile(r"[0-9]{1,18}", re.ASCII)  # name of the directory of a checkpoint
# What Orbax and TensorStore raise for a full disk or a damaged file; neither has a class for it.
STORAGE_ERRORS = (OSError, ValueError, KeyError)


# In a path, Orbax takes them for a pattern: it finds nothing, or the files of another directory.
PATTERN_CHARACTERS = "*?["


def complete_steps(directory: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a directory, oldest first.

    Orbax writes to a temporary name and renames it, so a name that is a number is complete. Asking
    its CheckpointManager would import Orbax at the start of a run.
    """
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if _STEP.fullmatch(path.name))


def read_json_item(where: Path, item: str) -> Any:
    """Return a JSON item of one checkpoint without importing Orbax."""
    return read_json(where / item / "metadata")


def open_array(where: Path, path: str, *, write: bool = False, cache_bytes: int = 0) -> Any:
    """Open an array of the item "state" of a checkpoint, to read or write any part of it.

    Args:
        where: Directory of one checkpoint.
        path: Path of the array in the state.
        write: Also open the array for writing.
        cache_bytes: Size in bytes of the cache of chunks that were read.

    Source: https://orbax.readthedocs.io, "Checkpoint format": a zarr array for each leaf, under the
    names of its path joined by dots, in a key-value store of OCDBT
    """
    import tensorstore

    store = {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{where.absolute()}/state/"},
        "path": path.replace("/", ".") + "/",
    }
    context = {"cache_pool": {"total_bytes_limit": cache_bytes}}
    spec = {"driver": "zarr", "kvstore": store, "context": context}
    return tensorstore.open(spec, open=True, read=True, write=write).result()


def whole_shard_handlers() -> Any:
    """Return handlers of arrays that write each shard from one replica, and so compile nothing.

    By default each replica of an array writes a slice of it, and JAX would compile the slicing
    during the run.
    """
    import jax
    import orbax.checkpoint as ocp

    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    return ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))


def host_array_handlers() -> Any:
    """Return handlers of NumPy arrays that write them without a copy, so that zeros take no memory.

    Without a handler for jax.Array, Orbax warns.
    """
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    handlers = ocp.type_handlers
    return handlers.create_type_handler_registry(
        (np.ndarray, handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, handlers.ArrayHandler()),
    )


def synchronization(processes: int) -> Any:
    """Return options with which Orbax synchronizes processes without compiling a collective.

    With active_processes, it uses the coordination service. It does not support them together with
    CheckpointManagerOptions(create=True).
    """
    import orbax.checkpoint as ocp

    active = set(range(processes)) if processes > 1 else None
    return ocp.options.MultiprocessingOptions(active_processes=active)


def before_commit(action: Callable[[Path], None]) -> Any:
    """Return a class of temporary directories: rank 0 calls `action` before a step's is renamed.

    At that time every rank has written its files. Directories of the items of a checkpoint use the
    same class; they are not passed to `action`.
    """
    import asyncio

    from orbax.checkpoint._src.path import atomicity

    class CommittedPath(atomicity.AtomicRenameTemporaryPath):
        async def finalize(self) -> None:
            if self.get_final().name.isdigit():
                await asyncio.to_thread(action, Path(self.get()))
            await super().finalize()

    return CommittedPath


_UNIMPORTANT = (
    # Of a missing or damaged _CHECKPOINT_METADATA, Orbax's notes on a checkpoint, not used.
    "Failed to json parse Metadata file",
    "Metadata file does not exist",
    # Of what a process that was killed left of a save: it is removed.
    "Attempted to create temporary directory",
)


class _BackgroundErrors(logging.Filter):
    """Filter of Orbax's log that notes the errors of its threads and drops their tracebacks."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Exception] = []

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if str(record.msg).startswith(_UNIMPORTANT):
            return False
        if "orbax" not in record.pathname or not isinstance(error, Exception):
            return True
        if record.threadName != "MainThread":
            self.noted.append(error)
        return False


class _UnretrievedWrites(logging.Filter):
    """Filter of asyncio's log that leaves out what follows from a failed save, which Orbax raises.

    Orbax writes arrays at the same time and raises the first error; the others are never asked for.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error, message = record.exc_info[1] if record.exc_info else None, record.getMessage()
        is_unretrieved = message.startswith("Task exception was never retrieved")
        return not (is_unretrieved and "/orbax/" in message and isinstance(error, STORAGE_ERRORS))


_filter, _write_filter = _BackgroundErrors(), _UnretrievedWrites()


@dataclass(frozen=True)
class _UnraisableHook:
    """Hook that leaves out what follows from a failed read or write, which Orbax raises.

    Orbax closes its event loop while TensorStore still completes other arrays, whose results are
    not used: their callbacks find it closed. Python code did not call them.
    """

    previous: Callable[[Any], Any]

    def __call__(self, unraisable: Any) -> None:
        trace = unraisable.exc_traceback
        is_callback = trace and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"
        if not (is_callback and str(unraisable.exc_value) == "Event loop is closed"):
            self.previous(unraisable)


def background_errors() -> list[Exception]:
    """Return a list to which Orbax's threads add what they fail with, until the next call.

    A rank that fails to write only logs it, and then waits for the others at a barrier that they
    never reach; so do the methods that would raise the error.
    """
    _filter.noted = []
    logging.getLogger("absl").addFilter(_filter)  # once, however often it is added
    logging.getLogger("asyncio").addFilter(_write_filter)
    if not isinstance(sys.unraisablehook, _UnraisableHook):
        sys.unraisablehook = _UnraisableHook(sys.unraisablehook)
    return _filter.noted


def caused_by_lost_peer(error: Exception) -> bool:
    """Return whether an error of a save is the failure of a barrier with the other processes."""
    import jax

    return isinstance(error.__cause__, jax.errors.JaxRuntimeError)
