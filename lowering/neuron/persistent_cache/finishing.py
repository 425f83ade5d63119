"""From what a cache holds to a cache that is finished, with the compiler of this machine."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lowering.errors import LoweringError
from lowering.machine.target import Target
from lowering.neuron import compiler
from lowering.neuron.persistent_cache import entries, locks
from lowering.neuron.persistent_cache.compilation import (
    Observer,
    Outcome,
    Settings,
    compile_entries,
)
from lowering.neuron.persistent_cache.entries import Entry


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
        LoweringError: there is no compiler, or no entry is of the one that is here: its NEFF in
            another's directory would be false.
    """
    began, clock = time.time(), time.monotonic()
    judge = locks.Judge(settings.stale_after)
    found = entries.scan(root, judge)
    outcomes: list[Outcome] = []
    if unfinished := [entry for entry in found if entry.is_unfinished]:
        here = _compiler(simulator)
        if here.directory not in {entry.compiler for entry in found}:
            raise LoweringError(
                f"the compiler here is {here.directory}, and {root} holds entries of others: "
                f"{_counted(unfinished)} are unfinished; install one of those"
            )
        mine = [entry for entry in unfinished if entry.compiler == here.directory]
        if others := _counted([entry for entry in unfinished if entry.compiler != here.directory]):
            observe(here.directory, f"entries of other compilers are left unfinished: {others}")
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


def _counted(unfinished: Sequence[Entry]) -> str:
    """As in "2 of neuronxcc-2.21.33363.0+82129205"."""
    counts = Counter(entry.compiler for entry in unfinished)
    return ", ".join(f"{count} of {name}" for name, count in counts.items())
