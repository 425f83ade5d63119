"""Entries of the persistent cache, and their states."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lowering.errors import LoweringError
from lowering.neuron import neff
from lowering.neuron.persistent_cache import failures, flags, locks
from lowering.neuron.persistent_cache.locks import Lock, LockChecker

# Names of the program's file, those of the newest tools first; the first that exists is used.
PROGRAMS = ("model.hlo_module.pb", "model.hlo_module.pb.gz", "model.hlo.pb")
NEFF, DONE, LOG = "model.neff", "model.done", "model.log"
# Output of a compiler that was killed, interrupted or out of memory; the last line states which.
# AWS's tools ignore this file, whereas a model.log would make them skip the program for good.
ATTEMPT_LOG = "graphtrain.log"

State = Literal["done", "not compiled", "failed", "locked", "stale lock", "incomplete"]


@dataclass(frozen=True)
class NeuronCacheEntry:
    """One MODULE_* directory, as it was when read."""

    directory: Path
    state: State
    reason: str  # details of the state; may be empty
    files: Mapping[str, int]  # file name to size in bytes
    locks: tuple[Lock, ...]
    failure: failures.CompileFailure | None = None  # of the last attempt

    @property
    def compiler(self) -> str:
        """Directory name of the entry's compiler, as in "neuronxcc-2.21.33363.0+82129205"."""
        return self.directory.parent.name

    @property
    def program(self) -> Path | None:
        """Path of the program's file; None if there is none."""
        file_name = next((name for name in PROGRAMS if self.files.get(name)), None)
        return self.directory / file_name if file_name else None

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes."""
        return sum(self.files.values())

    @property
    def is_unfinished(self) -> bool:
        """True if compiling can still complete the entry."""
        return self.state != "done" and self.program is not None


def scan(root: Path, judge: LockChecker) -> list[NeuronCacheEntry]:
    """Return every entry below the root of a cache, sorted by path.

    Raises:
        LoweringError: `root` is not the root directory of a cache.
    """
    if not root.is_dir():
        raise LoweringError(
            f"{root} is not a directory; pass the directory of NEURON_COMPILE_CACHE_URL (default: "
            "/var/tmp/neuron-compile-cache), and first copy a cache on S3 to this machine "
            "(aws s3 sync)"
        )
    if root.name.startswith("neuronxcc-"):
        raise LoweringError(f"{root} is the directory of one compiler; pass its parent directory")
    entries = []
    for path in sorted(root.glob("neuronxcc-*/MODULE_*")):
        with suppress(FileNotFoundError, NotADirectoryError):  # just removed; a stray file
            entries.append(read(path, judge))
    return entries


def read(directory: Path, judge: LockChecker | None) -> NeuronCacheEntry:
    """Read one entry; without a judge, ignore its locks."""
    files = _files(directory)
    lock_names = [name for name in files if name.endswith(locks.SUFFIX)]
    lock_states = [judge.check(directory / name) for name in sorted(lock_names)] if judge else []
    found_locks = tuple(lock for lock in lock_states if lock is not None)
    failure = _failure(directory, files)
    state, reason = _state(directory, files, found_locks, failure)
    return NeuronCacheEntry(directory, state, reason, files, found_locks, failure)


def _files(directory: Path) -> dict[str, int]:
    """Return name and bytes of every file; other processes may remove files at any time."""
    files = {}
    with os.scandir(directory) as dir_entries:
        for dir_entry in dir_entries:
            with suppress(FileNotFoundError):
                if dir_entry.is_file():
                    files[dir_entry.name] = dir_entry.stat().st_size
    return files


def _state(
    directory: Path,
    files: Mapping[str, int],
    found_locks: tuple[Lock, ...],
    failure: failures.CompileFailure | None,
) -> tuple[State, str]:
    neff_problem = _neff_problem(directory) if NEFF in files else ""
    if NEFF in files and DONE in files and not neff_problem:
        return "done", ""
    if live_owners := [lock.owner for lock in found_locks if lock.is_live]:
        return "locked", live_owners[0]
    if found_locks:
        return "stale lock", found_locks[0].owner
    if neff_problem:
        return "incomplete", neff_problem
    if not any(files.get(name) for name in PROGRAMS):
        return "incomplete", "no program"
    if flags.JSON_FILE not in files and flags.TEXT_FILE not in files:
        return "incomplete", f"no {flags.JSON_FILE}"
    reason = f"{failure.kind}: {failure.message}" if failure else ""
    if LOG in files and NEFF not in files:
        return "failed", reason
    if NEFF in files or DONE in files:
        present, missing = (NEFF, DONE) if NEFF in files else (DONE, NEFF)
        return "incomplete", f"{present} without {missing}"
    return "not compiled", reason


def _failure(directory: Path, files: Mapping[str, int]) -> failures.CompileFailure | None:
    """Return the failure of the last attempt according to its log, or None."""
    if NEFF in files:
        return None
    with suppress(FileNotFoundError):
        if LOG in files:
            return failures.classify(None, (directory / LOG).read_text(errors="replace"))
        if ATTEMPT_LOG in files:
            text = (directory / ATTEMPT_LOG).read_text(errors="replace")
            return failures.parse_failure(text.rstrip().rpartition("\n")[2])
    return None


def _neff_problem(directory: Path) -> str:
    """Return why the NEFF does not belong in this directory; empty if it does."""
    try:
        check_neff(directory / NEFF, directory)
    except FileNotFoundError:
        return f"{NEFF} has disappeared"
    except LoweringError as error:
        return str(error)
    return ""


def check_neff(path: Path, directory: Path) -> None:
    """Check that a NEFF is not empty, and is simulated only in the simulator's directory.

    Raises:
        LoweringError: the file is empty, or does not belong in this compiler's directory.
    """
    with path.open("rb") as file:
        neff.check_directory(directory.parent.name, file.read(len(neff.SIMULATOR_MAGIC)))
