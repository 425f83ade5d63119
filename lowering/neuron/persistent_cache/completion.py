"""How an entry is completed in place: whole or not at all, and the done marker last.

A reader takes a NEFF only with its marker, so the marker goes first when one is replaced. Killed
between any two of these steps, the entry is one that the next run compiles.
"""

import gzip
import os
import shutil
from pathlib import Path

from lowering.neuron.persistent_cache.entries import ATTEMPT, DONE, LOG, NEFF, check_neff
from lowering.neuron.persistent_cache.failures import Failure
from lowering.neuron.persistent_cache.locks import TEMPORARY


def complete(directory: Path, made: Path) -> None:
    """Put a new NEFF into an entry; call with its lock held.

    Raises:
        LoweringError: it does not belong there.
        OSError: it cannot be written.
    """
    check_neff(made, directory)
    temporary = _copy(made, directory)
    _remove(directory, DONE, LOG)
    os.replace(temporary, directory / NEFF)
    _sync(directory)
    (directory / DONE).touch(exist_ok=False)
    _sync(directory)
    _tidy(directory, ATTEMPT)


def fail(directory: Path, log: Path, failure: Failure) -> None:
    """Remember a refusal as AWS's tools do; leave an entry to the next run after anything else."""
    temporary = _copy(log, directory)
    if not failure.is_final:
        with temporary.open("ab") as file:
            file.write(f"\n{failure.kind}: {failure.said}\n".encode())
    _remove(directory, DONE, NEFF, LOG)
    os.replace(temporary, directory / (LOG if failure.is_final else ATTEMPT))
    _sync(directory)
    _tidy(directory, *([ATTEMPT] if failure.is_final else []))


def unpacked(program: Path, into: Path) -> Path:
    """The program of an entry in a directory of its own, named as AWS's wrapper names it."""
    name = program.name.removesuffix(".gz")
    copy = into / name.replace("model.", f"model.{program.parent.name}.", 1)
    opened = gzip.open if program.suffix == ".gz" else open
    with opened(program, "rb") as source, copy.open("wb") as target:
        shutil.copyfileobj(source, target)
    return copy


def _copy(source: Path, directory: Path) -> Path:
    """A copy in the directory under a name that nobody reads, on the disk."""
    temporary = directory / f"{TEMPORARY}{os.uname().nodename}-{os.getpid()}-{source.name}"
    try:
        with source.open("rb") as read, temporary.open("wb") as written:
            shutil.copyfileobj(read, written)
            written.flush()
            os.fsync(written.fileno())
    except OSError:  # a full disk should not hold what is of no use
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _remove(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).unlink(missing_ok=True)


def _tidy(directory: Path, *names: str) -> None:
    """Remove names, and what killed processes left: whoever holds the lock is alone here."""
    _remove(directory, *names)
    for leftover in directory.glob(f"{TEMPORARY}*"):
        leftover.unlink(missing_ok=True)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
