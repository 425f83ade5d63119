"""Statistics of a cache, and problems that preflight finds in programs that are not compiled."""

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from lowering.errors import LoweringError
from lowering.machine.target import Target
from lowering.neuron.persistent_cache import flags
from lowering.neuron.persistent_cache.entries import NeuronCacheEntry


def summarise(entries: Sequence[NeuronCacheEntry]) -> dict[str, Any]:
    """Return counts and bytes by compiler, flags in use, failures by kind and code, and problems.

    Reads the programs of unfinished entries and parses their HLO.
    """
    failed = [entry.failure for entry in entries if entry.failure is not None]
    return {
        "entries": len(entries),
        "bytes": sum(entry.nbytes for entry in entries),
        "compilers": _by_compiler(entries),
        "flags": _by_flags(entries),
        "failures": dict(Counter(failure.kind for failure in failed)),
        "codes": dict(Counter(code for failure in failed for code in failure.codes)),
        "problems": [
            {"entry": f"{entry.compiler}/{entry.directory.name}", "problem": problem}
            for entry in entries
            if entry.is_unfinished
            for problem in dict.fromkeys(_problems(entry))
        ],
    }


def _by_compiler(entries: Sequence[NeuronCacheEntry]) -> dict[str, Any]:
    by_compiler: dict[str, Any] = {}
    for entry in entries:
        stats = by_compiler.setdefault(entry.compiler, {"bytes": 0, "states": Counter()})
        stats["bytes"] += entry.nbytes
        stats["states"][entry.state] += 1
    return by_compiler


def _by_flags(entries: Sequence[NeuronCacheEntry]) -> dict[str, Any]:
    """Group flags by the key in entry names; AWS's tools treat two keys as two programs."""
    by_key: dict[str, Any] = {}
    for entry in entries:
        key = entry.directory.name.rpartition("+")[2]
        stats = by_key.setdefault(key, {"entries": 0, "flags": None})
        stats["entries"] += 1
        if stats["flags"] is None:
            try:
                stats["flags"] = flags.read(entry.directory)
            except LoweringError:
                continue  # another entry of the same key may have them
    return by_key


def _problems(entry: NeuronCacheEntry) -> Iterator[str]:
    """Yield problems that would make the compiler fail, or its NEFF not match the entry's name."""
    from lowering.neuron.preflight import preflight

    try:
        entry_flags = flags.read(entry.directory)
        if not flags.match_key(entry.directory.name, entry_flags):
            yield "its flags do not match the flags key in its name"
        findings = preflight(_binary(entry), _target_of(entry_flags), entry_flags)
        yield from (str(finding) for finding in findings if finding.severity == "error")
    except (LoweringError, OSError, EOFError, zlib.error) as error:  # truncated or damaged
        yield str(error)


def _target_of(entry_flags: Sequence[str]) -> Target:
    """Return the target that the flags compile for; trn1 if they name none."""
    match = re.search(r"--target[= ](\w+)", " ".join(entry_flags))
    name = match[1] if match else "trn1"
    return Target.parse("trn1" if name in ("trn1n", "inf2") else name)


def _binary(entry: NeuronCacheEntry) -> bytes:
    assert entry.program is not None
    binary = entry.program.read_bytes()
    return gzip.decompress(binary) if entry.program.suffix == ".gz" else binary
