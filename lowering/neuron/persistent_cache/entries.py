"""Entries of the persistent cache, and how far each has come."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lowering.errors import LoweringError
from lowering.neuron import neff
from lowering.neuron.persistent_cache import failures, flags, locks
from lowering.neuron.persistent_cache.locks import Judge, Lock

# By age of the tools, newest first; the first that an entry has is its program.
PROGRAMS = ("model.hlo_module.pb", "model.hlo_module.pb.gz", "model.hlo.pb")
NEFF, DONE, LOG = "model.neff", "model.done", "model.log"
# What a compiler said that was killed, interrupted or out of memory; the last line says which.
# AWS's tools know no such file: a model.log would be to them that the program is refused for good.
ATTEMPT = "graphtrain.log"

State = Literal["done", "not compiled", "failed", "locked", "stale lock", "incomplete"]


@dataclass(frozen=True)
class Entry:
    """One MODULE_* directory, as it was found."""

    directory: Path
    state: State
    reason: str  # of the state, where its name does not say all
    files: Mapping[str, int]  # name to bytes
    locks: tuple[Lock, ...]
    failure: failures.Failure | None = None  # of the last attempt

    @property
    def compiler(self) -> str:
        """The directory of its compiler, as in "neuronxcc-2.21.33363.0+82129205"."""
        return self.directory.parent.name

    @property
    def program(self) -> Path | None:
        """The file with what is compiled."""
        found = next((name for name in PROGRAMS if self.files.get(name)), None)
        return self.directory / found if found else None

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())

    @property
    def is_unfinished(self) -> bool:
        """Whether a compilation could still make it complete."""
        return self.state != "done" and self.program is not None


def scan(root: Path, judge: Judge) -> list[Entry]:
    """Every entry below the root of a cache, by name.

    Raises:
        LoweringError: it is no such directory.
    """
    if not root.is_dir():
        raise LoweringError(
            f"{root} is no directory; name that of NEURON_COMPILE_CACHE_URL (its default is "
            "/var/tmp/neuron-compile-cache), and copy one on S3 here first (aws s3 sync)"
        )
    if root.name.startswith("neuronxcc-"):
        raise LoweringError(f"{root} is that of one compiler; name the cache above it")
    found = []
    for path in sorted(root.glob("neuronxcc-*/MODULE_*")):
        with suppress(FileNotFoundError, NotADirectoryError):  # removed meanwhile; a stray file
            found.append(read(path, judge))
    return found


def read(directory: Path, judge: Judge | None) -> Entry:
    """Look at one entry; without a judge, as if it had no locks."""
    files = _files(directory)
    held = [name for name in files if name.endswith(locks.SUFFIX)]
    judged = [judge.of(directory / name) for name in sorted(held)] if judge else []
    found_locks = tuple(lock for lock in judged if lock is not None)
    failure = _failure(directory, files)
    state, reason = _state(directory, files, found_locks, failure)
    return Entry(directory, state, reason, files, found_locks, failure)


def _files(directory: Path) -> dict[str, int]:
    """Name and bytes of every file; others at work here may remove one at any time."""
    files = {}
    with os.scandir(directory) as found:
        for each in found:
            with suppress(FileNotFoundError):
                if each.is_file():
                    files[each.name] = each.stat().st_size
    return files


def _state(
    directory: Path,
    files: Mapping[str, int],
    found_locks: tuple[Lock, ...],
    failure: failures.Failure | None,
) -> tuple[State, str]:
    unfit = _unfit(directory) if NEFF in files else ""
    if NEFF in files and DONE in files and not unfit:
        return "done", ""
    if live := [lock.owner for lock in found_locks if lock.is_live]:
        return "locked", live[0]
    if found_locks:
        return "stale lock", found_locks[0].owner
    if unfit:
        return "incomplete", unfit
    if not any(files.get(name) for name in PROGRAMS):
        return "incomplete", "no program"
    if flags.JSON_FILE not in files and flags.TEXT_FILE not in files:
        return "incomplete", f"no {flags.JSON_FILE}"
    said = f"{failure.kind}: {failure.said}" if failure else ""
    if LOG in files and NEFF not in files:
        return "failed", said
    if NEFF in files or DONE in files:
        there, lacking = (NEFF, DONE) if NEFF in files else (DONE, NEFF)
        return "incomplete", f"{there} without {lacking}"
    return "not compiled", said


def _failure(directory: Path, files: Mapping[str, int]) -> failures.Failure | None:
    """What the log of the last attempt tells, if that failed."""
    if NEFF in files:
        return None
    with suppress(FileNotFoundError):
        if LOG in files:
            return failures.classify(None, (directory / LOG).read_text(errors="replace"))
        if ATTEMPT in files:
            text = (directory / ATTEMPT).read_text(errors="replace")
            return failures.told(text.rstrip().rpartition("\n")[2])
    return None


def _unfit(directory: Path) -> str:
    """Why a NEFF is none for this directory; empty if nothing speaks against it."""
    try:
        check_neff(directory / NEFF, directory)
    except FileNotFoundError:
        return f"{NEFF} is gone"
    except LoweringError as error:
        return str(error)
    return ""


def check_neff(path: Path, directory: Path) -> None:
    """Refuse an empty file, a simulated one in a real compiler's directory, and the reverse.

    Raises:
        LoweringError: says which.
    """
    with path.open("rb") as file:
        neff.check_directory(directory.parent.name, file.read(len(neff.MAGIC)))
