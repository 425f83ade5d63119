"""From what a cache holds to a cache that is finished, with the compiler of this machine."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lowering.errors import LoweringError
from lowering.neuron import compiler
from lowering.neuron.persistent_cache import entries, locks
from lowering.neuron.persistent_cache.compilation import (
    Observer,
    Outcome,
    Settings,
    compile_entries,
)
from lowering.neuron.persistent_cache.entries import Entry
from lowering.target import Target


@dataclass(frozen=True)
class Finished:
    """What became of all that was unfinished."""

    outcomes: tuple[Outcome, ...]
    began: float  # seconds since 1970
    seconds: float


def finish(root: Path, settings: Settings, observe: Observer, *, simulator: bool) -> Finished:
    """Compile every unfinished entry of a cache that is of this machine's compiler.

    Args:
        simulator: in place of neuronx-cc; for entries that stand in the simulator's own directory.

    Raises:
        LoweringError: there is no compiler, or all that is unfinished is of others.
    """
    began, clock = time.time(), time.monotonic()
    judge = locks.Judge(settings.stale_after)
    found = entries.scan(root, judge)
    outcomes: list[Outcome] = []
    if unfinished := [entry for entry in found if entry.is_unfinished]:
        here = _compiler(simulator)
        mine = _of_compiler(unfinished, here, observe)
        outcomes = compile_entries(mine, root, here, settings, observe)
    left = [lock for entry in found if entry.state == "done" for lock in entry.locks]
    if stale := [lock for lock in left if not lock.is_live]:  # of who was killed at the very end
        locks.clear(stale, root, judge, force=False)
    return Finished(tuple(outcomes), began, time.monotonic() - clock)


def _compiler(simulator: bool) -> compiler.Compiler:
    found = compiler.find(Target.parse("neuron-sim" if simulator else "trn1"))
    if found is None:
        raise LoweringError(
            "neuronx-cc is not installed here; install it from the index that the AWS Neuron "
            "documentation names (it needs no device), or finish the cache where it is installed"
        )
    return found


def _of_compiler(
    unfinished: Sequence[Entry], here: compiler.Compiler, observe: Observer
) -> list[Entry]:
    """The entries that stand in the directory of a compiler: its NEFF in another's would be false.

    Raises:
        LoweringError: none does.
    """
    mine = [entry for entry in unfinished if entry.compiler == here.directory]
    others = Counter(entry.compiler for entry in unfinished if entry.compiler != here.directory)
    said = ", ".join(f"{count} of {name}" for name, count in others.items())
    if not mine:
        raise LoweringError(
            f"the compiler here is {here.directory}, and all that is unfinished is of others: "
            f"{said}; install one of those"
        )
    for name, count in others.items():
        observe(name, f"{count} entries left, since the compiler here is {here.directory}")
    return mine
