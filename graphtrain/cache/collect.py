"""Garbage collection: select the entries to remove, and remove them."""

import json
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from graphtrain.cache.entries import CacheEntry, list_entries
from graphtrain.cache.layout import StorePaths
from graphtrain.cache.leases import CacheLease, try_hold_all
from graphtrain.cache.programs import DamagedEntry, UnusableEntry, exists, read_errors, read_record
from graphtrain.cache.stored_requests import list_digests
from graphtrain.cache.summaries import parse_part, read_summaries
from graphtrain.cache.writing import is_stale, remove_directory, remove_errors
from lowering.machine.leases import DEFAULT_TIMING
from lowering.machine.toolchain import version

_DAY = 86_400  # seconds


@dataclass(frozen=True)
class CollectionResult:
    """Result of one garbage collection."""

    removed: tuple[CacheEntry, ...]
    leased: tuple[CacheEntry, ...]  # due for removal, but another process holds their lease
    remaining_bytes: int  # total size of the remaining programs
    leftovers: (
        int  # number of dangling requests, temporary files, quarantined entries and old failures
    )

    @property
    def removed_bytes(self) -> int:
        """Total size of the removed programs."""
        return sum(entry.nbytes for entry in self.removed)


def collect(
    layout: StorePaths,
    *,
    max_bytes: int | None,
    max_age_days: float | None,
    other_toolchains: bool,
    keep: Collection[str],
    dry_run: bool = False,
) -> CollectionResult:
    """Remove programs, least recently used first, until the limits are met; then leftovers.

    With `dry_run`, nothing is removed, and the result is what would be.

    Raises:
        CacheError: the cache is not writable.
    """
    now = time.time()
    entries = list_entries(layout)
    oldest_use = 0.0 if max_age_days is None else now - max_age_days * _DAY
    removed, leased, leftovers = [], [], 0
    foreign = _other_toolchains(layout, entries) if other_toolchains else frozenset()
    for entry in _select_for_removal(entries, max_bytes, oldest_use, foreign, frozenset(keep)):
        requests = _count_requests(layout, entry) if dry_run else _remove(layout, entry)
        (leased if requests is None else removed).append(entry)
        leftovers += requests or 0
    found = [*_dangling(layout), *_chosen(layout.temporary, partial(is_stale, now=now))]
    found += _chosen(layout.quarantine, partial(_is_older, time=now))
    if max_age_days is not None:
        found += _chosen(layout.failures, partial(_is_older, time=oldest_use))
    leftovers += len(found) if dry_run else _unlink(found)
    kept_bytes = sum(entry.nbytes for entry in entries) - sum(entry.nbytes for entry in removed)
    return CollectionResult(tuple(removed), tuple(leased), kept_bytes, leftovers)


def _other_toolchains(layout: StorePaths, entries: Sequence[CacheEntry]) -> frozenset[str]:
    """Return the programs compiled with package versions other than the installed ones.

    Records are large, so they are read only for programs that no request with the installed
    versions resolves to.
    """
    is_installed = cache(_is_installed)  # thousands of requests share a few toolchain texts
    requested_programs = {
        request.program
        for request in read_summaries(layout)
        if "toolchain" in request.parts and is_installed(request.parts["toolchain"])
    }
    unrequested_programs = (
        entry.program for entry in entries if entry.program not in requested_programs
    )
    return frozenset(
        program for program in unrequested_programs if not is_installed(_toolchain(layout, program))
    )


def _toolchain(layout: StorePaths, digest: str) -> bytes:
    try:
        key = read_record(layout.program(digest), digest)["key"]
    except UnusableEntry:
        return b""  # unknown toolchain: do not remove
    return json.dumps(key.get("toolchain")).encode()


def _is_installed(toolchain: bytes) -> bool:
    """Return whether these package versions are installed; True if the part lists none."""
    try:
        versions = parse_part(toolchain)["versions"]
        return all(
            version(package) == compiled_version for package, compiled_version in versions.items()
        )
    except (KeyError, TypeError, AttributeError):
        return True


def _select_for_removal(
    entries: Sequence[CacheEntry],
    max_bytes: int | None,
    oldest_use: float,
    foreign: frozenset[str],
    keep: frozenset[str],
) -> list[CacheEntry]:
    """Return the entries to remove; `entries` are sorted by last use, newest first.

    Entries that are too old or from another toolchain are selected first, so that they count
    towards `max_bytes` before any other entry is removed.
    """
    chosen, spared = [], []
    for entry in reversed(entries):
        if keep.isdisjoint((entry.program, *entry.requests)):
            is_removable = entry.last_used < oldest_use or entry.program in foreign
            (chosen if is_removable else spared).append(entry)
    total = sum(entry.nbytes for entry in entries) - sum(entry.nbytes for entry in chosen)
    for entry in spared:
        if max_bytes is None or total <= max_bytes:
            break
        chosen.append(entry)
        total -= entry.nbytes
    return chosen


def _remove(layout: StorePaths, entry: CacheEntry) -> int | None:
    """Remove a program; return the number of its requests, or None if it is leased.

    Requests are removed first: no reader finds one whose program is missing.
    """
    path = layout.program(entry.program)
    with try_hold_all(layout, (entry.program, *entry.requests), DEFAULT_TIMING) as free:
        if not free:
            return None
        requests = _unlink(map(layout.request, entry.requests))
        with remove_errors(path):
            remove_directory(layout, path)
    return requests


def _count_requests(layout: StorePaths, entry: CacheEntry) -> int | None:
    """Return the number of requests of a program, or None if it is leased."""
    digests = (entry.program, *entry.requests)
    is_free = all(CacheLease(layout.lease(digest)).is_free() for digest in digests)
    return len(entry.requests) if is_free else None


def _dangling(layout: StorePaths) -> Iterator[Path]:
    """Yield the requests whose program is not stored."""
    stored = frozenset(list_digests(layout.programs))
    absent = [request for request in read_summaries(layout) if request.program not in stored]
    for request in absent:
        if not exists(layout.program(request.program)):  # another process may have stored it since
            yield layout.request(request.digest)


def _chosen(directory: Path, predicate: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield the children of a directory for which the predicate is true."""
    for path in _children(directory):
        with remove_errors(path), suppress(FileNotFoundError):  # removed meanwhile by another
            if predicate(path):
                yield path


def _is_older(path: Path, time: float) -> bool:
    return path.lstat().st_mtime < time


def _children(directory: Path) -> list[Path]:
    try:
        with read_errors(directory):
            return list(directory.iterdir())
    except DamagedEntry:
        return []  # the directory was never created


def _unlink(paths: Iterable[Path]) -> int:
    """Remove files and directories; return their number."""
    count = 0
    for path in paths:
        with remove_errors(path), suppress(FileNotFoundError):  # another process removed it first
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            count += 1
    return count
