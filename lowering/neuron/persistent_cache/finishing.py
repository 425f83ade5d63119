"""Compilation of all unfinished entries of a cache with the compiler of this machine."""

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
    CompileOptions,
    EntryOutcome,
    Observer,
    compile_entries,
)
from lowering.neuron.persistent_cache.entries import NeuronCacheEntry


@dataclass(frozen=True)
class FinishReport:
    """Results for all unfinished entries of a cache."""

    outcomes: tuple[EntryOutcome, ...]
    start_time: float  # seconds since 1970
    seconds: float


def finish(
    root: Path, settings: CompileOptions, observe: Observer, *, simulator: bool
) -> FinishReport:
    """Compile every unfinished entry of a cache that belongs to this machine's compiler.

    Args:
        root: root directory of the cache.
        settings: options for compiling entries.
        observe: called with the name of an entry or compiler and a progress message.
        simulator: use the simulator instead of neuronx-cc, for entries in the simulator's own
            directory.

    Raises:
        LoweringError: no compiler is installed, or no entry belongs to the installed one, whose
            NEFFs would be wrong in another compiler's directory.
    """
    start_time, start_clock = time.time(), time.monotonic()
    judge = locks.LockChecker(settings.stale_after)
    all_entries = entries.scan(root, judge)
    outcomes: list[EntryOutcome] = []
    if unfinished := [entry for entry in all_entries if entry.is_unfinished]:
        installed_compiler = _installed_compiler(simulator)
        if installed_compiler.directory not in {entry.compiler for entry in all_entries}:
            raise LoweringError(
                f"the compiler of this machine is {installed_compiler.directory}, but the "
                f"unfinished entries of {root} need another one: {_format_counts(unfinished)}; "
                "install one of these versions"
            )
        entries_to_compile = [
            entry for entry in unfinished if entry.compiler == installed_compiler.directory
        ]
        if skipped_counts := _format_counts(
            [entry for entry in unfinished if entry.compiler != installed_compiler.directory]
        ):
            observe(
                installed_compiler.directory,
                f"skipped unfinished entries of other compilers: {skipped_counts}",
            )
        outcomes = compile_entries(entries_to_compile, root, installed_compiler, settings, observe)
    leftover_locks = [
        lock for entry in all_entries if entry.state == "done" for lock in entry.locks
    ]
    # A process that is killed right after completing an entry leaves its lock.
    if stale_locks := [lock for lock in leftover_locks if not lock.is_live]:
        locks.remove_stale(stale_locks, root, judge, force=False)
    return FinishReport(tuple(outcomes), start_time, time.monotonic() - start_clock)


def _installed_compiler(simulator: bool) -> compiler.Compiler:
    installed_compiler = compiler.find_compiler(Target.parse("neuron-sim" if simulator else "trn1"))
    if installed_compiler is None:
        raise LoweringError(
            "neuronx-cc is not installed on this machine; install it from AWS's package index, see "
            "the AWS Neuron documentation (no device is needed), or finish the cache on a machine "
            "that has it"
        )
    return installed_compiler


def _format_counts(unfinished: Sequence[NeuronCacheEntry]) -> str:
    """Format counts by compiler, for example "2 of neuronxcc-2.21.33363.0+82129205"."""
    counts = Counter(entry.compiler for entry in unfinished)
    return ", ".join(f"{count} of {name}" for name, count in counts.items())
