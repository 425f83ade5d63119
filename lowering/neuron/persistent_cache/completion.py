"""Atomic completion of a cache entry in its directory; the done marker is written last.

Readers use a NEFF only if its marker exists, so the marker is removed first when a NEFF is
replaced. If the process is killed between any two steps, the next run compiles the entry again.
"""

import gzip
import os
import shutil
from pathlib import Path

from lowering.neuron.persistent_cache.entries import ATTEMPT_LOG, DONE, LOG, NEFF, check_neff
from lowering.neuron.persistent_cache.failures import CompileFailure
from lowering.neuron.persistent_cache.locks import TEMPORARY


def complete(directory: Path, neff: Path) -> None:
    """Put a new NEFF into an entry; the caller must hold the entry's lock.

    Raises:
        LoweringError: the NEFF does not belong in this directory.
        OSError: the NEFF cannot be written.
    """
    check_neff(neff, directory)
    temporary = _copy(neff, directory)
    _remove(directory, DONE, LOG)
    os.replace(temporary, directory / NEFF)
    _sync(directory)
    (directory / DONE).touch(exist_ok=False)
    _sync(directory)
    _remove_leftovers(directory, ATTEMPT_LOG)


def fail(directory: Path, log: Path, failure: CompileFailure) -> None:
    """Record a failed compilation in an entry; the caller must hold the entry's lock.

    A rejected program gets a model.log, as from AWS's tools. After any other failure, the next run
    compiles the entry again.
    """
    temporary = _copy(log, directory)
    if not failure.is_final:
        with temporary.open("ab") as file:
            file.write(f"\n{failure.kind}: {failure.message}\n".encode())
    _remove(directory, DONE, NEFF, LOG)
    os.replace(temporary, directory / (LOG if failure.is_final else ATTEMPT_LOG))
    _sync(directory)
    _remove_leftovers(directory, *([ATTEMPT_LOG] if failure.is_final else []))


def decompress_program(program: Path, into: Path) -> Path:
    """Copy and decompress an entry's program into a directory, named as by AWS's wrapper."""
    name = program.name.removesuffix(".gz")
    copy = into / name.replace("model.", f"model.{program.parent.name}.", 1)
    opener = gzip.open if program.suffix == ".gz" else open
    with opener(program, "rb") as source, copy.open("wb") as target:
        shutil.copyfileobj(source, target)
    return copy


def _copy(source: Path, directory: Path) -> Path:
    """Copy a file into the directory under a temporary name, and sync it to disk."""
    temporary = directory / f"{TEMPORARY}{os.uname().nodename}-{os.getpid()}-{source.name}"
    try:
        with source.open("rb") as source_file, temporary.open("wb") as temporary_file:
            shutil.copyfileobj(source_file, temporary_file)
            temporary_file.flush()
            os.fsync(temporary_file.fileno())
    except OSError:  # leave no incomplete file on a full disk
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _remove(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).unlink(missing_ok=True)


def _remove_leftovers(directory: Path, *names: str) -> None:
    """Remove the named files and leftovers of killed processes; the caller holds the lock."""
    _remove(directory, *names)
    for leftover in directory.glob(f"{TEMPORARY}*"):
        leftover.unlink(missing_ok=True)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
